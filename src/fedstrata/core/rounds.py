"""The round loop. Every method, on every engine, is this."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstrata.core import state
from fedstrata.core.client import Reply, Request
from fedstrata.core.plan import Method, Plan
from fedstrata.core.rng import SERVER, Streams
from fedstrata.core.server import Server, select, shared
from fedstrata.cost.ledger import SETUP, Entry, size, totals
from fedstrata.engines import Engine
from fedstrata.errors import UserError
from fedstrata.events import Event, Replied, Scored
from fedstrata.wire.tensors import WireError

Score = dict[str, float]


@dataclass
class Rounds:
    """One stage's rounds.

    Attributes:
        method: makes the plans.
        task: the task's kind.
        server: its weights move.
        engine: carries the exchanges.
        streams: all randomness.
        fraction: share of the clients asked per round.
        each_round: score after every round, or only after the last.
        own_tests: clients test on rows of their own, so every model is scored there.
        score: scores the server's model.
        folder: the run's output folder.
        tell: receives events.
    """

    method: Method
    task: str
    server: Server
    engine: Engine
    streams: Streams
    fraction: float
    each_round: bool
    own_tests: bool
    score: Callable[[Server], Score]
    folder: Path
    tell: Callable[[Event], None]

    def run(self, done: int, start: str, seconds: float) -> None:
        """Play all rounds from ``done`` on; after each, the state is on disk.

        Args:
            done: rounds an earlier call has committed.
            start: fingerprint of the start model.
            seconds: clock time those rounds took.

        Raises:
            UserError: a client's answer cannot be used.
        """
        began = time.monotonic() - seconds
        self.bytes = _total_bytes(self.folder)
        if done == 0 and (self.each_round or self.method.rounds == 0):
            self._evaluate(-1)
        for round in range(done, self.method.rounds):
            clients = select(self.engine.clients(), self.fraction, round, self.streams)
            plans = {client: self._plan(round, client) for client in clients}
            requests = (self._request(round, client, plan, "train") for client, plan in plans.items())
            for reply in in_order(self.engine.exchange(requests), clients):
                self._take(round, plans[reply.client], reply)
            changed = self.server.merge()
            if self.each_round or round == self.method.rounds - 1:
                self._evaluate(round)
            state.commit(self.folder, self.server, changed, round + 1, start, time.monotonic() - began)

    def _plan(self, round: int, client: str) -> Plan:
        return self.method.plan(self.server.parts, self.task, round, client, self.streams)

    def _request(self, round: int, client: str, plan: Plan, phase: Any) -> Request:
        server = self.server
        if client not in server.held and shared(server.parts, plan):
            parts = [part for part in server.parts.names if part not in plan.keep]
            start = {part: server.parts.elements([part]) * 4 for part in parts}
            self._ledger(Entry(SETUP, client, "setup", "down", part, n) for part, n in start.items())
        request = server.request(round, client, plan, phase)
        down = {part: size(tensors) for part, tensors in request.parts.items()}
        self._ledger(Entry(round, client, phase, "down", part, n) for part, n in down.items())
        return request

    def _take(self, round: int, plan: Plan, reply: Reply) -> None:
        """Record a reply and take it into the mean."""
        if not math.isfinite(reply.loss):
            raise UserError(
                f"round {round}, client {reply.client}: its training diverged (loss {reply.loss}); a smaller "
                "train.learning_rate helps"
            )
        up = {part: size(tensors) for part, tensors in reply.weights.items()}
        self._ledger(Entry(round, reply.client, "train", "up", part, n) for part, n in up.items())
        try:
            self.server.collect(plan, reply)
        except WireError as error:
            raise UserError(f"round {round}, client {reply.client}: its answer cannot be used: {error}") from None
        record = {
            "round": round,
            "client": reply.client,
            "examples": reply.examples,
            "steps": reply.steps,
            "tokens": reply.work.tokens,
            "loss": reply.loss,
            "flops": reply.flops,
            "seconds": reply.seconds,
            "layers": plan.layers,
            "trained": plan.train,
            "sent": plan.send,
        }
        state.append(self.folder / "rounds.jsonl", [record])
        self.tell(Replied(round, reply.client, reply.loss, reply.examples, reply.seconds, self.bytes))

    def _evaluate(self, round: int) -> None:
        """Score the server's model; or, where clients keep parts or test rows, each client's and their mean."""
        started = time.monotonic()
        plans = {client: self._plan(max(round, 0), client) for client in self.engine.clients()}
        record: dict[str, Any] = {"round": round, "client": SERVER}
        if self.own_tests or (any(plan.keep for plan in plans.values()) and round >= 0):
            whole = tuple(range(self.server.parts.depth))
            requests = (
                self._request(round, client, Plan(layers=whole, train=(), keep=plan.keep), "evaluate")
                for client, plan in plans.items()
            )
            replies = in_order(self.engine.exchange(requests), list(plans))
            own = {name: score for reply in replies for name, score in reply.scores.items()}
            names = dict.fromkeys(name for score in own.values() for name in score)
            record["score"] = {n: fmean(score[n] for score in own.values() if n in score) for n in names}
            record["clients"] = own
        else:
            record["score"] = self.score(self.server)
        record["seconds"] = time.monotonic() - started
        state.append(self.folder / "rounds.jsonl", [record])
        self.tell(Scored(round, record["score"]))

    def _ledger(self, entries: Iterable[Entry]) -> None:
        records = [entry.record() for entry in entries]
        self.bytes += sum(r["bytes"] for r in records if r["phase"] != "setup")
        state.append(self.folder / "ledger.jsonl", records)


def in_order(replies: Iterable[Reply], clients: Sequence[str]) -> Iterator[Reply]:
    """Replies in the order of ``clients``, however they arrive: so arrival cannot change a bit of a sum.

    A reply that is early waits; with replies already in order nothing is held back.
    """
    waiting: dict[str, Reply] = {}
    left = iter(clients)
    due = next(left, None)
    for reply in replies:
        waiting[reply.client] = reply
        while due is not None and due in waiting:
            yield waiting.pop(due)
            due = next(left, None)


def _total_bytes(folder: Path) -> int:
    made = totals(state.records(folder / "ledger.jsonl"))
    return made["up"] + made["down"]
