"""The round loop. Every method, on every engine, is this; a forecast is this too, over an engine without tensors.

for every round:
    the exchange trains: clients reply, their replies are aggregated, the server's optimizer steps
    the model is scored, at the server or by every client on its own rows
    after the last one the exchange hands out what is left to hand out
    the round is committed
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from fedstrata.cost.ledger import SETUP, Entry, totals
from fedstrata.errors import UserError
from fedstrata.events import Event, Missed, Replied, Scored
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import Phase, Weights
from fedstrata.plan.messages import Engine, NoReply, Reply, Request
from fedstrata.plan.plan import Method, Plan, make_plan
from fedstrata.plan.schedule import round_span, sample_clients
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.server.cohort import RoundSettings, in_order, why_missing
from fedstrata.server.late import Asked, lateness
from fedstrata.server.layers import ServerLayers
from fedstrata.server.records import Records
from fedstrata.server.reply_records import (
    check_loss,
    check_score,
    collected_record,
    name_outliers,
    reply_record,
)
from fedstrata.server.robust import TooFewRepliesError
from fedstrata.server.server import NotFiniteError, Server
from fedstrata.wire.codec import WireError, payload_bytes

Score = dict[str, float]
OUTGREW = (
    "if its numbers outgrew the wire type, a smaller train.learning_rate or wire.dtype = 'bf16' or 'fp32' helps"
)


class Half(Protocol):
    """The server's half of an exchange; see :mod:`fedstrata.exchanges`.

    Attributes:
        interleaved: clients of one group take turns step by step.
        layers: those that the server holds; None where the clients hold the whole model.
    """

    interleaved: bool
    layers: ServerLayers | None

    def connect(self, request: Request) -> AbstractContextManager[SplitLink | None]:
        """The client's way to the server's layers for a request."""

    def train(self, loop: Rounds, round: int) -> list[str]:
        """One round of training; the parts that changed."""

    def begin_group(self, round: int) -> None:
        """Clients that start from the same model are about to be asked."""

    def end_group(self, round: int) -> Weights:
        """They have replied; parts of the server's own that have changed."""

    def collect(
        self, round: int, client: str, phase: Phase, plan: Plan
    ) -> tuple[Weights, Iterable[tuple[str, str, int]]]:
        """A client's copies of the server's layers, and (direction, what, bytes) that passed to and from them."""

    def finish(self, loop: Rounds, round: int) -> None:
        """After the last round."""


@dataclass
class Rounds:
    """One stage's rounds.

    Attributes:
        method: makes the plans.
        task: the task's kind.
        server: its weights move.
        engine: brings requests to clients.
        half: the server's half of the method's exchange.
        streams: all randomness.
        settings: how many clients, how often scored.
        score: scores the server's model.
        records: where every reply and every byte is written down.
        commit: makes a round the state of the run: the parts that changed, rounds done.
        tell: receives events.
    """

    method: Method
    task: str
    server: Server
    engine: Engine
    half: Half
    streams: Streams
    settings: RoundSettings
    score: Callable[[Server], Score]
    records: Records
    commit: Callable[[Sequence[str], int], None]
    tell: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.participated = {line["client"] for line in self.records.lines("rounds")}
        spent = totals(self.records.lines("ledger"))
        self.bytes = spent["up"] + spent["down"]
        self.spare, self.missing = 0, dict[str, NoReply]()
        self.personal = False  # clients of the last round keep parts of their own

    def run(self, done: int) -> None:
        """Play all rounds from ``done`` on; after each, the state is committed.

        Raises:
            UserError: a client's reply cannot be used, or too few reply.
        """
        every = self.settings.each_round
        if done == 0 and (every or self.method.rounds == 0):
            self._evaluate(-1)
        for round in range(done, self.method.rounds):
            try:
                changed = self.half.train(self, round)
            except (NotFiniteError, TooFewRepliesError) as error:
                raise UserError(f"round {round + 1}: {error}") from None
            last = round == self.method.rounds - 1
            if every or last:
                self._evaluate(round)
            if last:
                self.half.finish(self, round)
            self.commit(changed, round + 1)

    def train_clients(self, round: int) -> list[str]:
        """The sampled clients train and send; the aggregate of what they send moves the model."""
        clients = sample_clients(self.engine.clients(), self.settings.fraction, round, self.streams)
        self.expect(clients)
        groups = [[client] for client in clients] if self.method.client_schedule == "sequential" else [clients]
        changed: dict[str, None] = {}
        for turn, group in enumerate(groups):
            begin, end = ((round + (turn + i) / len(groups)) / self.method.rounds for i in (0, 1))
            changed |= dict.fromkeys(self._train_group(round, group, (begin, end)))
        return list(changed)

    def _train_group(self, round: int, clients: Sequence[str], span: tuple[float, float]) -> list[str]:
        """Clients that start from the same model, and what becomes of it."""
        plans = {client: self.plan(round, client) for client in clients}
        self.personal = any(plan.keep for plan in plans.values())
        requests = (
            replace(self.request(round, client, plan, "train"), span=span) for client, plan in plans.items()
        )
        self.half.begin_group(round)
        for reply in self.replies(round, requests, clients):
            self.take(round, plans[reply.client], reply)
        changed = self.server.merge()
        self.records.append("outliers", name_outliers(round, self.server, self.tell))
        for part, new in self.half.end_group(round).items():
            self.server.replace(part, new)
            changed.append(part)
        return changed

    def plan(self, round: int, client: str) -> Plan:
        """The client's plan for a round."""
        return make_plan(self.method, self.server.parts, self.task, round, client, self.streams)

    def request(self, round: int, client: str, plan: Plan, phase: Phase) -> Request:
        """What a client is asked; what goes down with it is in the ledger."""
        server = self.server
        ledger_phase: Any = "train" if phase == "receive" else phase
        unsent = client not in server.client_versions and client not in getattr(self.engine, "own_start", ())
        if unsent and plan.received(server.parts):
            parts = [part for part in server.parts.each if part.name not in plan.away(server.parts)]
            self.ledger(Entry(SETUP, client, "setup", "down", part.name, 4 * part.elements) for part in parts)
        request = server.request(round, client, plan, phase)
        if phase == "train":
            first = client not in self.participated
            self.participated.add(client)
            request = replace(request, first=first, span=round_span(round, self.method.rounds))
        self.ledger(
            Entry(round, client, ledger_phase, "down", part, payload_bytes(tensors))
            for part, tensors in request.parts.items()
        )
        return request

    def take(self, round: int, plan: Plan, reply: Reply, asked: Asked | None = None) -> None:
        """Record a reply and take it into the aggregate; of asynchronous rounds with what it answers."""
        versions = None if asked is None else asked.versions
        self.record(round, plan, reply, None if asked is None else lateness(self.server.versions, plan, asked))
        self.ledger(
            Entry(round, reply.client, "train", "up", part, payload_bytes(tensors))
            for part, tensors in reply.weights.items()
        )
        copies = self._collect(round, reply.client, "train", plan)
        try:
            self.server.accumulate(plan, reply, copies, versions)
        except WireError as error:
            raise UserError(
                f"round {round + 1}, client {reply.client}: its reply cannot be used: {error}; {OUTGREW}"
            ) from None
        self.replied(round, reply)

    def expect(self, clients: Sequence[str], count: int | None = None) -> None:
        """Set how many of these clients may drop out before the quorum fails, of them or of ``count`` answers."""
        wanted = len(clients) if count is None else count
        self.spare, self.missing = len(clients) - math.ceil(self.settings.quorum * wanted), {}

    def replies(self, round: int, requests: Iterable[Request], clients: Sequence[str]) -> Iterator[Reply]:
        """The replies to requests, in the order of ``clients``; who does not reply is recorded as missing."""
        try:
            for reply in in_order(self.engine.exchange(requests), clients):
                if isinstance(reply, NoReply):
                    self.miss(round, reply)
                else:
                    yield reply
        except WireError as error:
            raise UserError(f"round {round + 1}: a message cannot be used: {error}; {OUTGREW}") from None

    def miss(self, round: int, missing: NoReply) -> None:
        """Record a client whose reply there is not, or cannot be used; with too many of them the quorum fails.

        Raises:
            UserError: it has failed.
        """
        self.server.forget(missing.client)
        line = {"round": round, "client": missing.client, "reason": missing.reason}
        self.records.append("missing", [line])
        self.tell(Missed(round, missing.client, missing.reason))
        self.spare, self.missing[missing.client] = self.spare - 1, missing
        if self.spare < 0:
            raise UserError(
                f"round {round + 1}: {why_missing(list(self.missing.values()))}; fewer clients reply than "
                f"engine.quorum = {self.settings.quorum:g} of those sampled; --resume asks them again"
            )

    def _collect(self, round: int, client: str, phase: Any, plan: Plan) -> Weights:
        """Record what passed between a client and the server's layers; its copy of them, where it had one."""
        copies, traffic = self.half.collect(round, client, phase, plan)
        self.ledger(Entry(round, client, phase, way, what, n) for way, what, n in traffic)  # type: ignore[arg-type]
        return copies

    def record(self, round: int, plan: Plan, reply: Reply, more: Mapping[str, Any] | None = None) -> None:
        """Write down a client's work, and what else there is to say of it.

        Raises:
            UserError: its training diverged.
        """
        check_loss(round, reply, self.server)
        self.records.append("rounds", [{**reply_record(round, self.server.parts, plan, reply), **(more or {})}])

    def record_collected(self, round: int, plan: Plan, reply: Reply) -> None:
        """Write down what a client computed once, without training."""
        self.records.append("rounds", [collected_record(round, plan, reply)])

    def replied(self, round: int, reply: Reply) -> None:
        """Tell of a reply."""
        self.tell(Replied(round, reply.client, reply.loss, reply.examples, reply.seconds, self.bytes))

    def _evaluate(self, round: int) -> None:
        """Score the server's model; or, where clients keep parts or test rows, each client's and their mean."""
        started = time.monotonic()
        line: dict[str, Any] = {"round": round, "client": SERVER}
        if self.settings.own_tests or self.personal:
            line["clients"] = own = self._scores_of_clients(round)
            metrics = dict.fromkeys(metric for score in own.values() for metric in score)
            line["score"] = {m: fmean(score[m] for score in own.values() if m in score) for m in metrics}
        else:
            line["score"] = self.score(self.server)
        line["seconds"] = time.monotonic() - started
        check_score(round, line["score"], self.server)
        self.records.append("rounds", [line])
        self.tell(Scored(round, line["score"]))

    def _scores_of_clients(self, round: int) -> dict[str, Score]:
        clients, whole = self.engine.clients(), tuple(range(self.server.parts.depth))
        plans = {client: self.plan(max(round, 0), client) for client in clients}
        self.expect(clients)
        requests = (
            self.request(round, client, replace(plan, layers=whole, train=(), send=(), between=()), "evaluate")
            for client, plan in plans.items()
        )
        scores: dict[str, Score] = {}
        replies = list(self.replies(round, requests, list(plans)))
        for reply in replies:
            self._collect(round, reply.client, "evaluate", plans[reply.client])
            scores |= reply.scores
        return scores

    def ledger(self, entries: Iterable[Entry]) -> None:
        """Write down what was communicated."""
        lines = [entry.record() for entry in entries]
        self.bytes += sum(line["bytes"] for line in lines if line["phase"] != "setup")
        self.records.append("ledger", lines)
