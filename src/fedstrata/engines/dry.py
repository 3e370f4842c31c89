"""The engine of a forecast: it answers by costs alone, and the real round loop over it writes the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fedstrata.events import Counted, Event
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.exchange import DryContext
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.server.cohort import RoundSettings
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


class DryAggregate:
    """Knows which tensors were sent, and nothing of their values."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """See :class:`fedstrata.server.aggregate.Aggregate`."""
        self.tensors.update(tensors)

    def result(self) -> Tensors:
        """See :class:`fedstrata.server.aggregate.Aggregate`."""
        return self.tensors


class DryOptimizer:
    """Leaves every tensor as it is."""

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        """See :class:`fedstrata.server.optimizer.ServerOptimizer`."""
        return old


def dry_run(
    context: DryContext, task: str, settings: RoundSettings, tell: Callable[[Event], None] = lambda event: None
) -> MemoryRecords:
    """The records that a run will write: the real loop, with replies that have costs and no content.

    Args:
        context: method, model and clients.
        task: the task's kind.
        settings: how many clients, how often scored.
        tell: receives an event after every round.
    """
    records = MemoryRecords()
    weights: dict[str, Tensors] = {
        name: empty(wire_spec(shapes, "fp32")) for name, shapes in context.parts.shapes.items()
    }
    rounds = Rounds(
        method=context.method,
        task=task,
        server=Server(context.parts, weights, context.wire, DryAggregate, DryOptimizer()),
        engine=DryEngine(context),
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
