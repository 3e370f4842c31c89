"""The weighted mean of replies, a few of them in one pass over blocks that stay in a core's cache.

A pass reads each reply once and, where there have been more, reads and writes the sums; with few replies there are
no sums in memory at all. All but the last pass run in a thread beside what the run does meanwhile. An element is
summed in fp64 in the order in which the replies came, so that neither blocks nor passes nor threads change a bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.on_disk import is_on_disk, let_go

CHUNK = 1 << 15
"""Elements of a block: its sums and a reply's elements, both in fp64, stay in a core's cache."""
HELD = 3
"""Replies of a tensor that wait to be summed in one pass; so memory does not grow with the number of clients."""
HELD_BYTES = 1 << 29
"""Bytes in memory of all that wait, beyond which nothing waits for more replies."""

Waiting = list[tuple[int, torch.Tensor]]
"""A tensor's replies with their weights, in order."""


class WeightedMean:
    """A running mean of tensors, weighted by examples. See :class:`fedstrata.server.aggregate.Aggregate`.

    Tensors that are added must not change until the round ends. Of each at most twice ``HELD`` are held: those
    that wait, and those that are being summed. Replies and sums are dropped one by one as the result is made.

    Attributes:
        sums: name -> weighted sum, fp64, of what no longer waits; not to be read while a pass runs.
        weights: name -> sum of the weights of all who sent it.
        waiting: name -> what is in no pass yet.
        bytes: in memory of all that waits.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, int] = {}
        self.waiting: dict[str, Waiting] = {}
        self.bytes = 0
        self.thread: ThreadPoolExecutor | None = None
        self.running: dict[str, Future[None]] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """Take in one client's tensors. Sums are fp64: a weight times a count is exact in it."""
        if self.bytes > HELD_BYTES:
            self._begin(list(self.waiting))
        elif any(len(self.waiting.get(name, ())) == HELD for name in tensors):
            self._begin([name for name, waiting in self.waiting.items() if len(waiting) == HELD])
        for name, tensor in tensors.items():
            self.waiting.setdefault(name, []).append((weight, tensor))
            self.bytes += _bytes(tensor)
            self.weights[name] = self.weights.get(name, 0) + weight

    def result(self) -> Tensors:
        """The mean over those that sent each tensor, fp32."""
        self._wait(list(self.running))
        if self.thread:
            self.thread.shutdown()
            self.thread = None
        return {name: self._mean(name) for name in list(self.waiting)}

    def _begin(self, names: Sequence[str]) -> None:
        """Begin a pass over what waits of these tensors, once the one before it is done."""
        self._wait(names)
        taken = {name: self.waiting[name] for name in names}
        self.waiting |= {name: [] for name in names}
        self.bytes -= sum(_bytes(tensor) for waiting in taken.values() for _, tensor in waiting)
        self.thread = self.thread or ThreadPoolExecutor(1, "mean")
        self.running |= dict.fromkeys(names, self.thread.submit(self._sum, taken))

    def _wait(self, names: Iterable[str]) -> None:
        for name in names:
            if running := self.running.pop(name, None):
                running.result()

    def _sum(self, taken: Mapping[str, Waiting]) -> None:
        """Take replies into the sums."""
        small: list[str] = []
        for name, waiting in taken.items():
            if not waiting:
                continue
            total, shape = self.sums.get(name), waiting[0][1].shape
            if shape.numel() <= CHUNK:
                small.append(name)
                self.sums[name] = torch.zeros(shape, dtype=torch.float64) if total is None else total
                continue
            self.sums[name] = torch.empty(shape, dtype=torch.float64) if total is None else total
            add_up(waiting, total, self.sums[name])
        for names in alike(taken, small):
            add_up_together([taken[name] for name in names], [self.sums[name] for name in names])

    def _mean(self, name: str) -> torch.Tensor:
        total, waiting = self.sums.pop(name, None), self.waiting.pop(name)
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
    # From a list: CPython fails where `gc.get_objects` in another thread sees a tuple grow from a generator.
    columns = zip(*[_blocks(tensor) for _, tensor in waiting], strict=True) if waiting else repeat(())
    before: Iterable[torch.Tensor | None] = repeat(None) if total is None else _blocks(total)
    for new, old, pieces in zip(_blocks(into), before, columns, strict=False):
        own = new if new.dtype == torch.float64 else sums if len(new) == size else sums[: len(new)]
        cast = wide if len(new) == size else wide[: len(new)]
        if old is None:
            own.zero_()
        elif total is not into:
            own.copy_(old)
        for (weight, _), piece in zip(waiting, pieces, strict=True):
            own.add_(cast.copy_(piece), alpha=weight)
        if divisor is not None:
            own.div_(divisor)
        if own is not new:
            new.copy_(own)
    let_go(tensor for _, tensor in waiting)


def alike(taken: Mapping[str, Waiting], names: Iterable[str]) -> Iterator[list[str]]:
    """Tensors whose replies have the same weights, by groups of ``CHUNK`` to twice as many elements."""
    groups: dict[tuple[int, ...], list[str]] = {}
    sizes = Counter[tuple[int, ...]]()
    for name in names:
        weights = tuple(weight for weight, _ in taken[name])
        groups.setdefault(weights, []).append(name)
        sizes[weights] += taken[name][0][1].numel()
        if sizes[weights] >= CHUNK:
            del sizes[weights]
            yield groups.pop(weights)
    yield from groups.values()


def add_up_together(waiting: Sequence[Waiting], sums: Sequence[torch.Tensor]) -> None:
    """Add small tensors, their replies with the same weights, to their sums: fewer calls than one by one."""
    wide = torch.empty(sum(total.numel() for total in sums), dtype=torch.float64)
    pieces = torch.split(wide, [total.numel() for total in sums])
    casts = [piece.view(total.shape) for piece, total in zip(pieces, sums, strict=True)]
    for replies in zip(*waiting, strict=True):
        torch._foreach_copy_(casts, [tensor for _, tensor in replies])
        torch._foreach_add_(list(sums), casts, alpha=replies[0][0])
    let_go(tensor for each in waiting for _, tensor in each)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in memory while it waits."""
    return 0 if is_on_disk(tensor) else tensor.nbytes


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of a tensor's elements, ``CHUNK`` at a time; none of an empty tensor."""
    return torch.split(tensor.reshape(-1), CHUNK) if tensor.numel() else ()
