"""The engine of a forecast: it answers by costs alone, and the real round loop over it writes the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedstrata.engines.arriving import ArrivingEngine, MemoryAnswers
from fedstrata.events import Counted, Event
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.exchange import DryContext
from fedstrata.plan.arrivals import Arrival
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.server.cohort import RoundSettings
from fedstrata.server.late import Late
from fedstrata.server.records import MemoryRecords
from fedstrata.server.rounds import Rounds
from fedstrata.server.server import Server
from fedstrata.wire.codec import wire_spec
from fedstrata.wire.dry import empty


@dataclass
class DryEngine:
    """Clients that compute nothing.

    Attributes:
        context: what is known of them.
    """

    context: DryContext

    def clients(self) -> list[str]:
        """The clients' names."""
        return list(self.context.lengths)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """One reply per request, before the next one is made; interleaved clients are all asked first."""
        handlers = EXCHANGES[self.context.method.exchange].dry_handlers
        if self.context.method.client_schedule == "interleaved":
            requests = list(requests)
        for request in requests:
            yield handlers[request.phase](self.context, request)


Moved = Sequence[tuple[frozenset[str], Tensors]]
"""Tensors of adapters, and those of the matrices that change with them where products are merged exactly."""


class DryAggregate:
    """Knows which tensors were sent, and nothing of their values."""

    def __init__(self, moved: Moved = (), least: int = 1) -> None:
        self.tensors, self.moved, self.least = Tensors(), moved, least
        self.senders = Counter[str]()

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """See :class:`fedstrata.server.aggregate.Aggregate`."""
        self.tensors.update(tensors)
        if self.least > 1:
            self.senders.update(tensors.keys())

    def result(self) -> Tensors:
        """See :class:`fedstrata.server.aggregate.Aggregate`; parts that too few have sent stay as they are."""
        if self.least > 1:
            return Tensors({name: own for name, own in self.tensors.items() if self.senders[name] >= self.least})
        for factors, matrices in self.moved:
            if factors & self.tensors.keys():
                self.tensors |= matrices
        return self.tensors


class DryOptimizer:
    """Leaves every tensor as it is."""

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        """See :class:`fedstrata.server.optimizer.ServerOptimizer`."""
        return old


def dry_run(
    context: DryContext,
    settings: RoundSettings,
    tell: Callable[[Event], None] = lambda event: None,
    least: int = 1,
    order: Sequence[Sequence[Arrival]] = (),
) -> MemoryRecords:
    """The records that a run will write: the real loop, with replies that have costs and no content.

    Args:
        context: method, model and clients.
        settings: how many clients, how often scored.
        tell: receives an event after every round.
        least: clients that must have sent a part for it to be merged.
        order: of asynchronous rounds, the arrivals of each.
    """
    records = MemoryRecords()
    arriving = ArrivingEngine(DryEngine(context), order, MemoryAnswers())
    rounds = Rounds(
        method=context.method,
        task=context.task,
        server=_server(context, least),
        engine=DryEngine(context) if context.buffer is None else arriving,
        half=EXCHANGES[context.method.exchange].dry_server(context),
        streams=context.streams,
        settings=settings,
        score=lambda server: {},
        records=records,
        commit=lambda changed, done: tell(Counted("rounds", done, context.method.rounds)),
        tell=lambda event: None,
    )
    rounds.run(0)
    return records


def _server(context: DryContext, least: int) -> Server:
    """A server whose weights have no content."""
    parts, wire = context.parts, context.wire
    weights: dict[str, Tensors] = {name: empty(wire_spec(own, "fp32")) for name, own in parts.shapes.items()}
    moved = [
        (frozenset(name for own in parts.adapters_of(part.depth) for name in own.shapes), weights[part.name])
        for part in parts.each
        if part.kind == "base"
    ]
    late = Late(dict(weights))
    return Server(parts, weights, wire, lambda: DryAggregate(moved, least), DryOptimizer(), late=late)
