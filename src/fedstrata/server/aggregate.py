"""Aggregates: how the clients' replies become the round's result, which the server's optimizer then takes up.

The robust ones are in :mod:`fedstrata.server.robust`. To add one: a class like
:class:`fedstrata.server.mean.WeightedMean` and a line in :data:`AGGREGATES`.
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
from fedstrata.server.mean import WeightedMean
from fedstrata.server.robust import RobustAggregate, RobustSettings


class Aggregate(Protocol):
    """Takes one round's replies, one after the other, in canonical order of the clients."""

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """Take in one client's tensors, fp32, by the names they have in the model.

        They do not change before the round ends, so an aggregate may hold on to them.

        Args:
            tensors: the tensors.
            weight: the client's number of examples, as the server knows it.
            client: its name.
        """

    def result(self) -> Tensors:
        """The round's result for every tensor that anybody sent, fp32; it is asked for once."""


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


def own_result(aggregate: Aggregate, parts: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Tensors:
    """What a round's aggregate comes to; one of the caller's own is compared with the model.

    Args:
        aggregate: the round's.
        parts: part -> tensor name -> shape.

    Raises:
        UserError: it lacks a tensor of a part of which it has another, or one has another shape.
    """
    result = aggregate.result()
    if type(aggregate).__module__.startswith("fedstrata."):
        return result
    what = f"aggregate: {type(aggregate).__name__}.result"
    for own in parts.values():
        if (found := own.keys() & result.keys()) and (lacks := sorted(own.keys() - found)):
            raise UserError(f"{what} has no {lacks[0]}; expected a tensor for each that was added")
    shapes = {name: shape for own in parts.values() for name, shape in own.items()}
    return {name: as_held(what, name, tensor, shapes[name]) for name, tensor in result.items() if name in shapes}


def as_held(what: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that an object of the caller's own has made, in fp32.

    Raises:
        UserError: it has not the shape of the model's.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(f"{what} gives {name} the shape {tuple(tensor.shape)}; expected {tuple(shape)}")
    return tensor.float()
