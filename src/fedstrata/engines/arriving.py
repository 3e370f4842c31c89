"""Asynchronous rounds in one process: clients compute at once, and answers arrive in an order known before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch

from fedstrata.plan.arrivals import Arrival
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Engine, NoReply, Positions, Reply, Request
from fedstrata.wire.store import Store, read_tensors

HEADER = "header"
"""Under which a stored answer has all but its tensors, as JSON."""
MISSING = "did not answer, as recorded"


class Answers(Protocol):
    """Answers that have not arrived yet."""

    def keep(self, round: int, reply: Reply) -> None:
        """Keep the answer to a request of a round."""

    def load(self, round: int, client: str) -> Reply:
        """A client's answer to the request of a round."""


@dataclass
class MemoryAnswers:
    """In memory, for forecasts: a client has one at most."""

    replies: dict[str, Reply] = field(default_factory=dict)

    def keep(self, round: int, reply: Reply) -> None:
        """See :class:`Answers`."""
        self.replies[reply.client] = reply

    def load(self, round: int, client: str) -> Reply:
        """See :class:`Answers`."""
        return self.replies[client]


@dataclass(frozen=True)
class StoredAnswers:
    """On the clients' disks, as part of a run's state.

    Attributes:
        stores: client -> its disk.
    """

    stores: Mapping[str, Store]

    def keep(self, round: int, reply: Reply) -> None:
        """See :class:`Answers`."""
        names = [[part, name] for part, tensors in reply.weights.items() for name in tensors]
        header = json.dumps({**asdict(replace(reply, weights={})), "weights": names}).encode()
        tensors = {f"{part}|{name}": reply.weights[part][name] for part, name in names}
        content = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.stores[reply.client].late.save(round, {HEADER: content, **tensors})

    def load(self, round: int, client: str) -> Reply:
        """See :class:`Answers`."""
        tensors = read_tensors(self.stores[client].late.path(round))
        header = json.loads(tensors[HEADER].numpy().tobytes())
        weights: dict[str, Tensors] = {}
        for part, name in header["weights"]:
            weights.setdefault(part, {})[name] = tensors[f"{part}|{name}"]
        return Reply(**{**header, "weights": weights, "work": Positions(**header["work"])})


@dataclass
class ArrivingEngine:
    """An engine that answers at once, with answers that arrive later; see
    :class:`fedstrata.plan.messages.BufferedEngine`.

    Attributes:
        engine: it.
        order: the arrivals of each round.
        kept: answers that have not arrived yet.
    """

    engine: Engine
    order: Sequence[Sequence[Arrival]]
    kept: Answers
    requests: Sequence[Request] = ()
    arrived: Sequence[Arrival] = ()

    def clients(self) -> Sequence[str]:
        """The clients' names."""
        return self.engine.clients()

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
        """See :class:`fedstrata.plan.messages.Engine`."""
        return self.engine.exchange(requests)

    def arrive(self, round: int, requests: Sequence[Request], count: int) -> Sequence[Arrival]:
        """See :class:`fedstrata.plan.messages.BufferedEngine`."""
        self.requests, self.arrived = requests, self.order[round]
        return self.arrived

    def answers(self) -> Iterator[Reply | NoReply]:
        """All who were asked compute; what arrives later is kept. Who is recorded as missing computes nothing."""
        arrivals = {arrival.client: arrival for arrival in self.arrived}
        asked = {request.client: request for request in self.requests}
        idle = {name for name, arrival in arrivals.items() if arrival.missing and name in asked}
        fresh = self.engine.exchange(request for name, request in asked.items() if name not in idle)
        for name in self.clients():
            if name in asked and name not in idle:
                reply = next(fresh)
                if name not in arrivals and isinstance(reply, Reply):
                    self.kept.keep(asked[name].round, reply)
                    continue
            elif name not in arrivals:
                continue
            elif arrivals[name].missing:
                reply = NoReply(name, MISSING)
            else:
                reply = self.kept.load(arrivals[name].asked, name)
            yield reply
        self.requests = self.arrived = ()

    def give_up(self, client: str) -> None:
        """Nothing that is still to come has to be stopped."""

    def ask_again(self, requests: Iterable[Request]) -> None:
        """What was asked before has been computed, and is kept."""
