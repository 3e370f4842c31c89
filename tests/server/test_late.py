"""Late answers: against a plain reference, in memory and on the disk; the order of arrival, drawn and recorded."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from fedstrata.errors import UserError
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan import arrivals as module
from fedstrata.plan.arrivals import Arrival, Cohort, drawn_arrivals, overdue, recorded_arrivals
from fedstrata.plan.messages import Reply
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.server.late import Late, clear_versions, damaged_versions
from fedstrata.server.server import Server
from fedstrata.wire.codec import Wire
from fedstrata.wire.delta import job_codec
from tiny import tiny_model

FORMS = ((4, 1.0, False), (8, 0.5, False))
PLANS = [Plan((0, 1), trained, trained) for trained in (("layer.1", "head"), ("layer.0",))]
STEPS = [  # who is asked with which plan, and whose answers then end the round
    ({"a": 0, "b": 0, "c": 1}, ["c"]),
    ({"c": 0}, ["b"]),
    ({"b": 1}, ["b", "c"]),
    ({"b": 0, "c": 1}, ["a", "b"]),
]


def server(wire: Wire, folder: Path | None) -> Server:
    model = tiny_model(layers=2)
    parts = find_parts(model)
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    return Server(parts, weights, wire, late=Late(dict(weights), folder))


@pytest.mark.parametrize(
    ("dtype", "forms", "max_norm"),
    [("fp32", None, None), ("fp16", None, None), ("int8", None, None), ("fp32", FORMS, None), ("fp32", None, 0.5)],
)
@pytest.mark.parametrize("stored", [False, True])
def test_late_answers_count_as_their_change_times_their_share(
    tmp_path: Path, dtype: str, forms: object, max_norm: float | None, stored: bool
) -> None:
    """Every version that was ever sent is remembered, and the mean is of whole tensors, one after the other."""
    wire = Wire(job_codec(dtype, forms))  # type: ignore[arg-type]
    made, generator = server(wire, tmp_path if stored else None), torch.Generator().manual_seed(1)
    made.max_norm = max_norm
    asked, staleness = {}, 0
    for round, (requests, ended_by) in enumerate(STEPS):
        for client, plan in requests.items():
            request = made.request(round, client, PLANS[plan])
            made.late.ask(request)
            sent = {part: made.received(part) for part in PLANS[plan].send}  # what the client now has
            back = {part: made.unchanged(part) for part in PLANS[plan].send}
            asked[client] = PLANS[plan], sent, back, made.late.asked[client].versions
        before = {part: made.unchanged(part) for part in made.parts.names}
        versions, old = dict(made.versions), dict(made.weights)
        moved: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for weight, client in enumerate(sorted(ended_by), 3):
            plan, sent, back, trained_from = asked.pop(client)
            message, came = {}, {}
            for part in plan.send:
                own = {name: t + torch.randn(t.shape, generator=generator) / 10 for name, t in sent[part].items()}
                message[part] = wire.encode(own, sent[part] if wire.changes else None)[0]
                decoded = wire.decode(message[part], sent[part] if wire.changes else None)
                late = versions[part] - trained_from[part]
                staleness = max(staleness, late)
                for name, tensor in decoded.items():
                    change = (tensor - back[part][name]) * (1 / math.sqrt(1 + late))
                    came[name] = tensor if late == 0 else before[part][name] + change
            if max_norm is not None:
                now = {name: t for part in plan.send for name, t in before[part].items()}
                norm = math.sqrt(sum(float((came[n].double() - now[n].double()).square().sum()) for n in came))
                share = min(1.0, max_norm / norm)
                came = {n: (now[n].double() + share * (came[n].double() - now[n])).float() for n in came}
            for name, tensor in came.items():
                moved.setdefault(name, []).append((weight, tensor))
            made.late.asked.pop(client)
            made.accumulate(plan, Reply(client, weight, message), {}, trained_from)
        made.keep_late()
        made.merge()
        for part, shapes in made.parts.shapes.items():
            for name in shapes:
                if name not in moved:
                    assert torch.equal(made.weights[part][name], old[part][name])
                    continue
                total = sum((w * t.double() for w, t in moved[name]), torch.zeros((), dtype=torch.float64))
                mean = (total / sum(w for w, _ in moved[name])).float()
                wanted = mean if wire.lossless else old[part][name] + (mean - before[part][name])
                torch.testing.assert_close(made.weights[part][name], wanted, rtol=1e-6, atol=1e-6)
    assert staleness == 2


def test_only_versions_that_are_needed_stay(tmp_path: Path) -> None:
    made = server(Wire(job_codec("fp32", None)), tmp_path)
    generator = torch.Generator().manual_seed(0)
    records = []
    for round in range(4):
        for client in ("late", "fast") if round == 1 else ("fast",):
            made.late.ask(made.request(round, client, PLANS[0]))
        del made.late.asked["fast"]
        weights = {
            part: {
                name: torch.randn(shape, generator=generator) for name, shape in made.parts.shapes[part].items()
            }
            for part in PLANS[0].send
        }
        made.accumulate(PLANS[0], Reply("fast", 1, weights), {}, None)
        made.keep_late()
        made.merge()
        records.append(made.late.record())
        clear_versions(tmp_path, records[-2:])
    held = {path.name for path in tmp_path.iterdir()}
    assert held == {"layer.1@1.safetensors", "head@1.safetensors"}, "layer.0 and below are the start model's"
    assert damaged_versions(tmp_path, records[-1]) is None
    again = server(Wire(job_codec("fp32", None)), tmp_path)
    again.late.restore(json.loads(json.dumps(records[-1])))
    assert again.late.asked == made.late.asked
    for name, tensor in made.late.unchanged(made.wire, "head", 1).items():
        assert torch.equal(again.late.unchanged(again.wire, "head", 1)[name], tensor)
    path = tmp_path / "head@1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert damaged_versions(tmp_path, records[-1]) == path
    made.late.asked.clear()
    made.keep_late()
    clear_versions(tmp_path, [made.late.record()])
    assert not list(tmp_path.iterdir())


EXAMPLES = {"a": 5, "b": 9, "c": 20, "d": 40}


def cohort(buffer: int = 2, fraction: float = 1.0, seed: int = 3) -> Cohort:
    return Cohort(list(EXAMPLES), fraction, buffer, Streams(seed))


def test_who_has_fewer_examples_answers_more_often() -> None:
    order = list(islice(drawn_arrivals(cohort(), EXAMPLES), 60))
    assert order == list(islice(drawn_arrivals(cohort(), EXAMPLES), 60))
    assert order != list(islice(drawn_arrivals(cohort(seed=4), EXAMPLES), 60))
    count = {name: sum(arrival.client == name for each in order for arrival in each) for name in EXAMPLES}
    assert count["a"] > count["b"] > count["c"] > count["d"] > 0
    assert all(len(each) == 2 for each in order)
    everybody = next(drawn_arrivals(cohort(buffer=9), EXAMPLES))
    assert sorted(arrival.client for arrival in everybody) == list(EXAMPLES)


def test_nobody_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STALENESS", 3)
    assert overdue({"a": 0, "b": 1}, 4) == ["a"]
    order = list(islice(drawn_arrivals(cohort(), {**EXAMPLES, "d": 10**6}), 9))
    assert not [arrival for each in order for arrival in each if arrival.client == "d"]
    late = [arrival for each in islice(drawn_arrivals(cohort(), EXAMPLES), 60) for arrival in each]
    assert max(arrival.round - arrival.asked for arrival in late) == 3


A, B, C = (Arrival(0, name, 0) for name in "abc")


def write(path: Path, order: list[Arrival]) -> Path:
    path.write_text("".join(json.dumps(arrival.record()) + "\n" for arrival in order), "utf-8")
    return path


def test_a_recorded_order_is_read_back(tmp_path: Path) -> None:
    order = list(islice(drawn_arrivals(cohort(fraction=0.75), EXAMPLES), 9))
    path = write(tmp_path / "arrivals.jsonl", [arrival for each in order for arrival in each])
    assert recorded_arrivals(path, cohort(fraction=0.75), 9) == order
    assert recorded_arrivals(path, cohort(fraction=0.75), 4) == order[:4]
    missing = [A, Arrival(0, "b", 0, missing=True), C, Arrival(1, "d", 0), Arrival(1, "b", 1)]
    assert len(recorded_arrivals(write(path, missing), cohort(), 2)[0]) == 3


WRONG = [
    ([A, B], 2, "has the arrivals of 1 round, the job has 2"),
    ([], 1, "has the arrivals of 0 rounds, the job has 1"),
    ([A], 1, r"round 1 ends with 1 answer, not with engine.buffer = 2"),
    ([A, B, C], 1, r"round 1 ends with 3 answers, not with engine.buffer = 2"),
    ([A, A], 1, "line 2: 'a' answers in round 1 what it was asked in round 1, but there it was not asked, or has"),
    ([A, Arrival(0, "e", 0)], 1, "line 2: 'e' answers"),
    (
        [A, B, Arrival(1, "c", 1), Arrival(1, "d", 0)],
        2,
        "line 3: 'c' answers in round 2 what it was asked in round 2",
    ),
]


@pytest.mark.parametrize(("order", "rounds", "complaint"), WRONG)
def test_an_order_of_another_job_is_refused(
    tmp_path: Path, order: list[Arrival], rounds: int, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        recorded_arrivals(write(tmp_path / "arrivals.jsonl", order), cohort(), rounds)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"round": 0, "client": "a"}',
        '{"round": 0, "client": "a", "asked": -1}',
        '{"round": 0.5, "client": "a", "asked": 0}',
        '{"round": 0, "client": "a", "asked": 0, "weight": 9}',
        '{"round": 0, "client": "a", "asked": 0, "missing": 1}',
        '{"round": 1e99, "client": "a", "asked": 0}',
    ],
)
def test_a_line_that_is_no_arrival_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text(json.dumps(A.record()) + "\n" + line + "\n", "utf-8")
    with pytest.raises(UserError, match=r"arrivals.jsonl, line 2: is not an arrival; expected"):
        recorded_arrivals(path, cohort(), 1)
