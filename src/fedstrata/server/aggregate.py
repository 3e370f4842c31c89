"""Aggregates: how the clients' replies become the round's result, which the server's optimizer then takes up.

The robust ones are in :mod:`fedstrata.server.robust`. To add one: a class like :class:`WeightedMean` and a line in
:data:`AGGREGATES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.aggregate_rules import ROBUST
from fedstrata.job.tables import Server
from fedstrata.plan.kinds import Tensors
from fedstrata.server.robust import RobustAggregate, RobustSettings

CHUNK = 1 << 15
"""Elements converted between fp32 and fp64 at a time: few enough to stay in a core's cache."""


class Aggregate(Protocol):
    """Takes one round's replies, one after the other, in canonical order of the clients."""

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """Take in one client's tensors, fp32, by the names they have in the model.

        Args:
            tensors: the tensors.
            weight: the client's number of examples, as the server knows it.
            client: its name.
        """

    def result(self) -> Tensors:
        """The round's result for every tensor that anybody sent, fp32."""


class WeightedMean:
    """A running mean of tensors, weighted by examples; memory does not grow with the number of clients."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, int] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """See :class:`Aggregate`. Sums are fp64: a weight times a count is exact in it."""
        for name, tensor in tensors.items():
            first = name not in self.sums
            if first:
                self.sums[name] = torch.empty(tensor.shape, dtype=torch.float64)
            wide = torch.empty(min(CHUNK, tensor.numel()), dtype=torch.float64)
            for total, piece in zip(_pieces(self.sums[name]), _pieces(tensor), strict=True):
                if first:
                    total.zero_()
                total.add_(wide[: len(piece)].copy_(piece), alpha=weight)
            self.weights[name] = self.weights.get(name, 0) + weight

    def result(self) -> Tensors:
        """The mean over those that sent each tensor."""
        return {name: _divided(total, self.weights[name]) for name, total in self.sums.items()}


def _divided(total: torch.Tensor, weight: int) -> torch.Tensor:
    """``total / weight`` in fp32."""
    mean = torch.empty(total.shape)
    for old, new in zip(_pieces(total), _pieces(mean), strict=True):
        new.copy_(old / weight)
    return mean


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of a tensor's elements, ``CHUNK`` at a time."""
    return torch.split(tensor.reshape(-1), CHUNK)


MakeAggregate = Callable[[], Aggregate]

AGGREGATES: Mapping[str, MakeAggregate] = {
    "mean": WeightedMean,
    **{rule: partial(RobustAggregate, rule) for rule in ROBUST},
}
"""``[server] aggregate`` -> what begins a round with it."""


def aggregate_of(table: Server, folder: Path) -> MakeAggregate:
    """What begins a round with the aggregate of a job's ``[server]``.

    Args:
        table: the job's.
        folder: on whose disk replies may wait.

    Raises:
        UserError: there is none.
    """
    if table.aggregate not in ROBUST:
        return make_aggregate(table.aggregate)
    settings = RobustSettings(table.malicious or 1, table.clip_radius, table.clip_steps or 3)
    return partial(RobustAggregate, table.aggregate, settings, folder)


def make_aggregate(name: str) -> MakeAggregate:
    """What begins a round with the aggregate of a name.

    Raises:
        UserError: there is none.
    """
    if name not in AGGREGATES:
        raise UserError(f"[server] aggregate: {name!r} is invalid; {did_you_mean(name, AGGREGATES)}")
    return AGGREGATES[name]
