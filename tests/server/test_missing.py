"""Clients that do not reply: what they may hold, what they are sent next, and when the quorum fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from fedstrata.engines.dry import DryAggregate, DryEngine, DryOptimizer
from fedstrata.errors import UserError
from fedstrata.exchanges.exchange import DryContext, PlainHalf
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams
from fedstrata.server.cohort import why_missing
from fedstrata.server.records import MemoryRecords
from fedstrata.server.rounds import Rounds, RoundSettings
from fedstrata.server.server import Server
from fedstrata.wire.activations import StreamForm
from fedstrata.wire.codec import make_codec, wire_spec
from fedstrata.wire.dry import DryWire, empty
from fedstrata.wire.rows import RowForm
from tiny import tiny_model, train_config


class FirstLayerThenHead(Method):
    """Trains layer 0 in the first round and the head in all others."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        own = ("head",) if round else ("layer.0",)
        return Plan(tuple(range(parts.depth)), own, own)


@dataclass
class AbsentEngine(DryEngine):
    """A forecast's engine, some of whose clients do not reply in some rounds: (round, client)."""

    absent: frozenset[tuple[int, str]] = frozenset()

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:  # type: ignore[override]
        for request in requests:
            if (request.round, request.client) in self.absent:
                yield NoReply(request.client, "is away")
            else:
                yield from super().exchange([request])


def play(*absent: tuple[int, str], quorum: float = 0.3) -> MemoryRecords:
    """Four rounds of three clients."""
    parts = find_parts(tiny_model())
    method, records = FirstLayerThenHead(rounds=4), MemoryRecords()
    context = DryContext(
        method=method,
        parts=parts,
        streams=Streams(0),
        train=train_config(),
        wire=DryWire(make_codec("fp32")),
        dtype="fp32",
        stream=StreamForm(RowForm(), RowForm()),
        lengths={client: np.full(4, 8) for client in "abc"},
        tests=dict,
        predicted=lambda lengths, width: 1,
    )
    weights = {name: empty(wire_spec(shapes, "fp32")) for name, shapes in parts.shapes.items()}
    Rounds(
        method=method,
        task="mlm",
        server=Server(parts, weights, context.wire, DryAggregate, DryOptimizer()),
        engine=AbsentEngine(context, frozenset(absent)),
        half=PlainHalf(),
        streams=context.streams,
        settings=RoundSettings(quorum=quorum),
        score=lambda server: {},
        records=records,
        commit=lambda changed, done: None,
        tell=lambda event: None,
    ).run(0)
    return records


def sent(records: MemoryRecords, client: str) -> list[set[str]]:
    """The parts sent down to a client, round by round."""
    down = [line for line in records.lines("ledger") if line["direction"] == "down" and line["client"] == client]
    return [{line["part"] for line in down if (line["round"], line["phase"]) == (n, "train")} for n in range(4)]


def test_who_missed_a_round_is_sent_again_what_went_down_in_it() -> None:
    """Nobody knows whether it arrived: layer 0, though it has not changed since."""
    records = play((1, "b"))
    assert sent(records, "a") == [set(), {"layer.0"}, {"head"}, {"head"}]
    assert sent(records, "b") == [set(), {"layer.0"}, {"layer.0", "head"}, {"head"}]
    assert sent(records, "c") == sent(records, "a")
    assert records.lines("missing") == [{"round": 1, "client": "b", "reason": "is away"}]


def test_who_missed_several_rounds_too() -> None:
    records = play((1, "b"), (2, "b"), (2, "c"))
    assert sent(records, "b") == [set(), {"layer.0"}, {"layer.0", "head"}, {"layer.0", "head"}]
    assert sent(records, "c") == [set(), {"layer.0"}, {"head"}, {"layer.0", "head"}]
    trained = [(line["round"], line["client"]) for line in records.lines("rounds") if line["client"] != "server"]
    absent = {(1, "b"), (2, "b"), (2, "c")}
    assert trained == [(n, client) for n in range(4) for client in "abc" if (n, client) not in absent]


def test_the_start_model_is_sent_once_all_the_same() -> None:
    setup = [line for line in play((0, "b"), (1, "b")).lines("ledger") if line["phase"] == "setup"]
    assert len(setup) == len({(line["client"], line["part"]) for line in setup}) == 3 * 5


def test_of_many_who_do_not_reply_the_first_are_named_in_few_words() -> None:
    missing = [NoReply(f"site-{i}", "x" * 1000) for i in range(500)]
    said = why_missing(missing)
    assert said.startswith(f"site-0 {'x' * 297}...; site-1 xxx")
    assert said.endswith("; and 492 more")
    assert why_missing(missing[:8]).count(";") == 7


def test_the_run_stops_when_fewer_than_the_quorum_reply() -> None:
    assert len(play((2, "a"), (2, "b"), quorum=0.33).lines("missing")) == 2
    said = r"round 3: a is away; b is away; fewer clients reply than engine\.quorum = 0\.34"
    with pytest.raises(UserError, match=said):
        play((1, "c"), (2, "a"), (2, "b"), quorum=0.34)
    with pytest.raises(UserError, match=r"round 1: a is away"):
        play((0, "a"), quorum=1.0)
