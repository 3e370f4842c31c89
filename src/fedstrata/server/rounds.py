"""The round loop. Every method, on every engine, is this."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstrata.cost.flops import server_flops
from fedstrata.cost.ledger import SETUP, Entry, size, totals
from fedstrata.errors import UserError
from fedstrata.events import Event, Missed, Replied, Scored, Stepped
from fedstrata.models.parts import part_tensors
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Engine, NoReply, Reply, Request
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.server import state
from fedstrata.server.layers import ServerLayers
from fedstrata.server.server import Server, shared
from fedstrata.server.trainer import NAME, ServerTrainer
from fedstrata.wire.codec import WireError

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
        quorum: share of those asked who must answer.
        each_round: score after every round, or only after the last.
        own_tests: clients test on rows of their own, so every model is scored there.
        score: scores the server's model.
        folder: the run's output folder.
        tell: receives events.
        central: where the server trains, on features of the clients; None where the clients do.
        layers: what the server holds of the model, where the clients' batches pass through it.
    """

    method: Method
    task: str
    server: Server
    engine: Engine
    streams: Streams
    fraction: float
    quorum: float
    each_round: bool
    own_tests: bool
    score: Callable[[Server], Score]
    folder: Path
    tell: Callable[[Event], None]
    central: ServerTrainer | None = None
    layers: ServerLayers | None = None

    def run(self, done: int, start: str, seconds: float) -> None:
        """Play all rounds from ``done`` on; after each, the state is on disk.

        Args:
            done: rounds an earlier call has committed.
            start: fingerprint of the start model.
            seconds: clock time those rounds took.

        Raises:
            UserError: a client's answer cannot be used, or too few answer.
        """
        began = time.monotonic() - seconds
        self.met = {line["client"] for line in state.records(self.folder / "rounds.jsonl")}
        self.bytes = _total_bytes(self.folder)
        if done == 0 and (self.each_round or self.method.rounds == 0):
            self._evaluate(-1)
        for round in range(done, self.method.rounds):
            changed = self._train(round) if self.central is None else self._train_here(round, self.central)
            last = round == self.method.rounds - 1
            if self.each_round or last:
                self._evaluate(round)
            if self.central is not None and last:
                self._hand_out(round)
            state.commit(self.folder, self.server, changed, round + 1, start, time.monotonic() - began)

    def _train(self, round: int) -> list[str]:
        """The clients train and send; the mean of what they send is the next model."""
        clients = sample_clients(self.engine.clients(), self.fraction, round, self.streams)
        self._ask(clients)
        together = [[client] for client in clients] if self.method.client_schedule == "sequential" else [clients]
        changed: dict[str, None] = {}
        for turn, group in enumerate(together):
            done = [(round + (turn + i) / len(together)) / self.method.rounds for i in (0, 1)]
            changed |= dict.fromkeys(self._train_group(round, group, (done[0], done[1])))
        return list(changed)

    def _train_group(self, round: int, clients: Sequence[str], span: tuple[float, float]) -> list[str]:
        """Clients that start from the same model, and what becomes of it."""
        plans = {client: self._plan(round, client) for client in clients}
        requests = (
            replace(self._request(round, client, plan, "train"), span=span) for client, plan in plans.items()
        )
        if self.layers:
            self.layers.begin(round)
        for reply in self._exchange(round, requests, clients):
            self._take(round, plans[reply.client], reply)
        changed = self.server.merge()
        for part, new in (self.layers.end(round) if self.layers else {}).items():
            self.server.replace(part, new)
            changed.append(part)
        return changed

    def _train_here(self, round: int, central: ServerTrainer) -> list[str]:
        """The server trains on what the clients sent of their texts before the first round."""
        if round == 0:
            self._gather(central)
        server, plan = self.server, self._plan(round, NAME)
        worker = central.worker
        worker.load(
            {part: (("server", server.versions[part]), server.weights[part]) for part in server.parts.names}
        )

        def told(step: int, steps: int, loss: float, seen: int) -> None:
            self.tell(Stepped(round, NAME, step, steps, loss, seen))

        rounds = self.method.rounds
        reply = central.train(plan, round, told, (round / rounds, (round + 1) / rounds))
        self._record(round, plan, reply)
        self.tell(Replied(round, NAME, reply.loss, reply.examples, reply.seconds, self.bytes))
        for part in plan.train:
            new = part_tensors(worker.model, server.parts, [part])
            server.replace(part, {name: tensor.to("cpu", copy=True) for name, tensor in new.items()})
        return list(plan.train)

    def _gather(self, central: ServerTrainer) -> None:
        """Ask every client once for what the encoder makes of its texts; its head is yet to come."""
        clients = self.engine.clients()
        self._ask(clients)
        whole = tuple(range(self.server.parts.depth))
        plan = Plan(layers=whole, train=(), keep=("head",), freeze_encoder=True)
        requests = (self._request(0, client, plan, "hidden_states") for client in clients)
        for reply in self._exchange(0, requests, clients):
            sent = reply.weights.get("hidden_states", {})
            self._ledger([Entry(0, reply.client, "hidden_states", "up", "hidden_states", size(sent))])
            try:
                central.take(reply.client, sent)
            except WireError as error:
                raise UserError(f"client {reply.client}: its features cannot be used: {error}") from None
            record = {"round": 0, "client": reply.client, "examples": reply.examples, "steps": 0, "tokens": 0}
            record |= {"loss": None, "flops": reply.flops, "seconds": reply.seconds}
            state.append(self.folder / "rounds.jsonl", [{**record, "layers": whole, "trained": (), "sent": ()}])

    def _hand_out(self, round: int) -> None:
        """Every client gets the parts it lacks: what the server has learnt."""
        whole = Plan(layers=tuple(range(self.server.parts.depth)), train=(), freeze_encoder=True)
        clients = self.engine.clients()
        self._ask(clients)
        requests = (replace(self._request(round, c, whole, "train"), phase="receive") for c in clients)
        list(self._exchange(round, requests, clients))

    def _plan(self, round: int, client: str) -> Plan:
        return self.method.plan(self.server.parts, self.task, round, client, self.streams)

    def _request(self, round: int, client: str, plan: Plan, phase: Any) -> Request:
        server = self.server
        if client not in server.held and shared(server.parts, plan):
            parts = [part for part in server.parts.names if part not in plan.server]
            start = {part: server.parts.elements([part]) * 4 for part in parts}
            self._ledger(Entry(SETUP, client, "setup", "down", part, n) for part, n in start.items())
        request = server.request(round, client, plan, phase)
        if phase == "train" and client not in self.met:
            self.met.add(client)
            request = replace(request, first=True)
        down = {part: size(tensors) for part, tensors in request.parts.items()}
        self._ledger(Entry(round, client, phase, "down", part, n) for part, n in down.items())
        return request

    def _take(self, round: int, plan: Plan, reply: Reply) -> None:
        """Record a reply and take it into the mean."""
        self._record(round, plan, reply)
        up = {part: size(tensors) for part, tensors in reply.weights.items()}
        self._ledger(Entry(round, reply.client, "train", "up", part, n) for part, n in up.items())
        copied = self._crossed(round, reply.client, "train", plan)
        try:
            self.server.collect(plan, reply, copied)
        except WireError as error:
            raise UserError(f"round {round}, client {reply.client}: its answer cannot be used: {error}") from None
        self.tell(Replied(round, reply.client, reply.loss, reply.examples, reply.seconds, self.bytes))

    def _ask(self, clients: Sequence[str]) -> None:
        """From now on these are asked: so many of them may be missing."""
        self.spare = len(clients) - max(1, math.ceil(self.quorum * len(clients)))

    def _exchange(self, round: int, requests: Iterable[Request], clients: Sequence[str]) -> Iterator[Reply]:
        try:
            for answer in in_order(self.engine.exchange(requests), clients):
                if isinstance(answer, NoReply):
                    self._miss(round, answer)
                else:
                    yield answer
        except WireError as error:
            raise UserError(
                f"round {round}: a message cannot be used: {error}; if its numbers outgrew the wire, a smaller "
                "train.learning_rate or wire.dtype = 'bf16' or 'fp32' helps"
            ) from None

    def _miss(self, round: int, missing: NoReply) -> None:
        self.server.forget(missing.client)
        record = {"round": round, "client": missing.client, "reason": missing.reason}
        state.append(self.folder / "missing.jsonl", [record])
        self.tell(Missed(round, missing.client, missing.reason))
        self.spare -= 1
        if self.spare < 0:
            raise UserError(
                f"round {round}: {missing.client} {missing.reason}; fewer clients answer than engine.quorum = "
                f"{self.quorum:g} of those asked; --resume asks them again"
            )

    def _crossed(self, round: int, client: str, phase: Any, plan: Plan) -> Weights:
        """Record what passed between a client and the server's layers; its copy of them, where it had one."""
        if not (self.layers and plan.server):
            return {}
        copied, traffic = self.layers.taken(client)
        self._ledger(Entry(round, client, phase, way, what, n) for (way, what), n in traffic.items())  # type: ignore[arg-type]
        return copied

    def _record(self, round: int, plan: Plan, reply: Reply) -> None:
        if not math.isfinite(reply.loss):
            raise UserError(
                f"round {round}, client {reply.client}: its training diverged (loss {reply.loss}); a smaller "
                "train.learning_rate helps"
            )
        record = {
            "round": round,
            "client": reply.client,
            "examples": reply.examples,
            "steps": reply.steps,
            "tokens": reply.work.tokens,
            "loss": reply.loss,
            "flops": reply.flops,
            "server_flops": server_flops(self.server.parts, plan, reply.work),
            "seconds": reply.seconds,
            "layers": plan.layers,
            "trained": plan.train,
            "sent": plan.send,
            "server": plan.server,
        }
        state.append(self.folder / "rounds.jsonl", [record])

    def _evaluate(self, round: int) -> None:
        """Score the server's model; or, where clients keep parts or test rows, each client's and their mean."""
        started = time.monotonic()
        plans = {client: self._plan(max(round, 0), client) for client in self.engine.clients()}
        self._ask(list(plans))
        record: dict[str, Any] = {"round": round, "client": SERVER}
        if self.own_tests or (any(plan.keep for plan in plans.values()) and round >= 0):
            whole = tuple(range(self.server.parts.depth))
            requests = (
                self._request(round, client, replace(plan, layers=whole, train=(), send=()), "evaluate")
                for client, plan in plans.items()
            )
            replies = list(self._exchange(round, requests, list(plans)))
            for reply in replies:
                self._crossed(round, reply.client, "evaluate", plans[reply.client])
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


def in_order(answers: Iterable[Reply | NoReply], clients: Sequence[str]) -> Iterator[Reply | NoReply]:
    """Answers in the order of ``clients``, however they arrive: so arrival cannot change a bit of a sum.

    An answer that is early waits; with answers already in order nothing is held back.
    """
    waiting: dict[str, Reply | NoReply] = {}
    left = iter(clients)
    due = next(left, None)
    for answer in answers:
        waiting[answer.client] = answer
        while due is not None and due in waiting:
            yield waiting.pop(due)
            due = next(left, None)


def _total_bytes(folder: Path) -> int:
    made = totals(state.records(folder / "ledger.jsonl"))
    return made["up"] + made["down"]
