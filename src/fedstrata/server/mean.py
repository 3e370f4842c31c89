"""The weighted mean of replies, a few of them in one pass over blocks that stay in a core's cache.

A pass reads each reply once and, where there have been more, reads and writes the sums; with few replies there are
no sums in memory at all. Every element is summed in fp64 in the order in which the replies came, so that neither
the blocks nor the number of replies in a pass changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat

import torch

from fedstrata.plan.kinds import Tensors

CHUNK = 1 << 14
"""Elements of a block: its sums and a reply's elements, both in fp64, stay in a core's cache."""
HELD = 4
"""Replies of a tensor that wait to be summed in one pass; so memory does not grow with the number of clients."""
HELD_BYTES = 1 << 30
"""Bytes of all that wait, beyond which nothing waits any longer."""

Waiting = list[tuple[int, torch.Tensor]]
"""A tensor's replies with their weights, in order."""


class WeightedMean:
    """A running mean of tensors, weighted by examples. See :class:`fedstrata.server.aggregate.Aggregate`.

    Tensors that are added must not change until the round ends.

    Attributes:
        sums: name -> weighted sum, fp64, of what no longer waits.
        weights: name -> sum of the weights of all who sent it.
        waiting: name -> what is not in the sums yet.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, int] = {}
        self.waiting: dict[str, Waiting] = {}
        self.bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """Take in one client's tensors. Sums are fp64: a weight times a count is exact in it."""
        for name, tensor in tensors.items():
            waiting = self.waiting.setdefault(name, [])
            if len(waiting) == HELD:
                self._sum(name)
            waiting.append((weight, tensor))
            self.bytes += tensor.nbytes
            self.weights[name] = self.weights.get(name, 0) + weight
        if self.bytes > HELD_BYTES:
            for name in self.waiting:
                self._sum(name)

    def result(self) -> Tensors:
        """The mean over those that sent each tensor, fp32."""
        return {name: self._mean(name) for name in self.waiting}

    def _sum(self, name: str) -> None:
        """Take what waits of a tensor into its sums."""
        waiting, total = self.waiting[name], self.sums.get(name)
        if not waiting:
            return
        if total is None:
            self.sums[name] = total = torch.empty(waiting[0][1].shape, dtype=torch.float64)
            add_up(waiting, None, total)
        else:
            add_up(waiting, total, total)
        self.bytes -= sum(tensor.nbytes for _, tensor in waiting)
        waiting.clear()

    def _mean(self, name: str) -> torch.Tensor:
        total, waiting = self.sums.get(name), self.waiting[name]
        mean = torch.empty(waiting[0][1].shape if total is None else total.shape)
        add_up(waiting, total, mean, self.weights[name])
        return mean


def add_up(waiting: Waiting, total: torch.Tensor | None, into: torch.Tensor, divisor: int | None = None) -> None:
    """Write ``(total + weights * tensors) / divisor`` into a tensor, block by block.

    Args:
        waiting: weights and tensors, in the order of the sum.
        total: what the sum begins with, fp64, may be ``into`` itself; None for 0.
        into: fp64 or fp32, of the tensors' shape.
        divisor: None for none.
    """
    size = min(CHUNK, into.numel())
    wide, sums = torch.empty(2, size, dtype=torch.float64)
    columns = zip(*(_blocks(tensor) for _, tensor in waiting), strict=True) if waiting else repeat(())
    before: Iterable[torch.Tensor | None] = repeat(None) if total is None else _blocks(total)
    for new, old, pieces in zip(_blocks(into), before, columns, strict=False):
        length = len(new)
        own = new if new.dtype == torch.float64 else sums[:length]
        if old is None:
            own.zero_()
        elif total is not into:
            own.copy_(old)
        for (weight, _), piece in zip(waiting, pieces, strict=True):
            own.add_(wide[:length].copy_(piece), alpha=weight)
        if divisor is not None:
            own.div_(divisor)
        if own is not new:
            new.copy_(own)


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of a tensor's elements, ``CHUNK`` at a time; none of an empty tensor."""
    return torch.split(tensor.reshape(-1), CHUNK) if tensor.numel() else ()
