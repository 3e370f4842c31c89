"""Asynchronous rounds between sites: their recorded arrivals in one process, kills, sites that are late or lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import NAMES, Post, Village, lines, same, weights

import fedstrata
from fedstrata.plan import arrivals
from fedstrata.runs import stages
from fedstrata.sites import engine as between
from fedstrata.sites.answered import AnsweredHeader
from fedstrata.sites.messages import decode_message, encode_message

Jobs = Callable[..., dict[str, Any]]


class SlowPost(Post):
    """Brings an answer at once, unless its site is slow to train: then after so many looks of the server."""

    slow: dict[str, int]
    twice = False

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        now = []
        for number in numbers:
            name, message, _ = self.waiting[number]
            left = self.slow.get(name, 0)
            if left == 0 or b'"kind":"request"' not in message:
                now.append(number)
            else:
                self.slow[name] = left - 1
        for number, answer in super().receive(now):
            yield number, answer
            if self.twice:
                yield number, answer


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    made = Village(tmp_path, monkeypatch)
    made.post.__class__ = SlowPost
    monkeypatch.setattr(between, "FAREWELL_SECONDS", 0.1)
    made.post.slow = {}  # type: ignore[attr-defined]
    return made


def jobs(village: Village, config: dict[str, Any], **engine: Any) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """What replays a run between sites in one process, and the job between sites."""
    here, there = village.jobs(config, buffer=2, **engine)

    def replay(run: Any) -> Any:
        engine = {"name": "inprocess", "buffer": 2, "arrivals": str(run.folder / "arrivals.jsonl")}
        return fedstrata.run({**here, "engine": {**engine, "quorum": there["engine"].get("quorum", 0.5)}})

    return replay, there


def taken(run: Any) -> list[list[tuple[str, int]]]:
    """Who answered in each round, and in which it was asked."""
    found: dict[int, list[tuple[str, int]]] = {}
    for line in lines(run.folder / "arrivals.jsonl"):
        if not line["missing"]:
            found.setdefault(line["round"], []).append((line["client"], line["asked"]))
    return [found[round] for round in sorted(found)]


CASES = [
    {},
    {
        "wire": {"codec": "delta", "bits": 2, "density": 0.2},
        "train": {"optimizer_state": "persist", "lr_schedule": "polynomial"},
    },
]


@pytest.mark.parametrize("tables", CASES)
def test_recorded_arrivals_in_one_process_come_to_the_same_bits(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any]
) -> None:
    """Also where the server was killed, and with it the answers that were in no round yet."""
    replay, there = jobs(village, job("fedavg", "classify", 1, method={"rounds": 6}, **tables))
    commit = stages.state.RunState.commit
    for killed in (1, 2, 5):

        def dies(*args: Any, at: int = killed) -> None:
            if args[3] == at:
                raise RuntimeError("killed")
            commit(*args)  # the state, the server, what changed, rounds done

        monkeypatch.setattr(stages.state.RunState, "commit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            fedstrata.run(there, resume=True)
        village.start()
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    run = fedstrata.run(there, resume=True)
    assert not (run.folder / "missing.jsonl").exists()
    assert any(asked < round for round, each in enumerate(taken(run)) for _, asked in each)
    same(run, replay(run))


def test_with_a_buffer_for_all_the_run_is_a_plain_one(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedbt", "classify", 2), buffer=3)
    here, _ = village.jobs(job("fedbt", "classify", 2))
    here["model"] = there["model"]
    same(fedstrata.run(here), fedstrata.run(there))


def test_a_site_that_never_answers_gains_nothing(job: Jobs, village: Village) -> None:
    """It holds nobody up, and is sent nothing more."""
    replay, there = jobs(village, job("fedavg", "classify", 1, method={"rounds": 4}))
    village.post.slow = {"b": 10**9}  # type: ignore[attr-defined]
    run = fedstrata.run(there)
    assert [sorted(each) for each in taken(run)] == [[("a", n), ("c", n)] for n in range(4)]
    down = {line["round"] for line in lines(run.folder / "ledger.jsonl") if line["client"] == "b"}
    assert down == {-1}, "the start model, which is all that it was asked for in round 1"
    same(run, replay(run))


def test_as_many_fast_sites_as_a_round_takes_make_every_round(job: Jobs, village: Village) -> None:
    """What docs/security.md says of bad ones: nothing of slower sites is in the model, whatever the limits."""
    _, there = village.jobs(job("fedavg", "classify", 1, method={"rounds": 3}), buffer=1)
    village.post.slow = {"a": 10**9, "c": 10**9}  # type: ignore[attr-defined]
    assert taken(fedstrata.run(there)) == [[("b", round)] for round in range(3)]


def test_one_that_is_given_up_is_asked_anew_and_its_old_answer_is_not_read(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST_STALENESS", 1)
    replay, there = jobs(village, job("fedavg", "classify", 1, method={"rounds": 5}))
    village.post.slow = {"b": 2}  # type: ignore[attr-defined]

    def watch(event: Any) -> None:
        if type(event).__name__ == "Missed":
            village.post.slow = {"b": 0}  # type: ignore[attr-defined]

    run = fedstrata.run(there, progress=watch)
    [missing] = lines(run.folder / "missing.jsonl")
    assert (missing["round"], missing["client"]) == (2, "b")
    assert missing["reason"].startswith("has not answered within")
    assert next(asked for each in taken(run) for name, asked in each if name == "b") == 2
    same(run, replay(run))


def test_answers_that_come_twice_count_once(job: Jobs, village: Village) -> None:
    replay, there = jobs(village, job("fedavg", "classify", 1, method={"rounds": 4}))
    village.post.slow, village.post.twice = {"b": 2}, True  # type: ignore[attr-defined]
    run = fedstrata.run(there)
    assert all(len(each) == 2 for each in taken(run))
    assert any(asked < round for round, each in enumerate(taken(run)) for _, asked in each)
    same(run, replay(run))


def test_a_site_cannot_make_up_how_late_it_is(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is missing if it says that it answers a later round: the server knows what it has asked."""
    replay, there = jobs(village, job("fedavg", "classify", 1, method={"rounds": 5}))
    host, honest = village.post.hosts["b"], village.post.hosts["b"].answer
    village.post.slow = {"b": 2}  # type: ignore[attr-defined]
    shifts = iter((1,))

    def lies(message: bytes) -> bytes:
        reply = bytes(honest(message))
        if b'"kind":"reply"' not in reply:
            return reply
        envelope = decode_message(reply, "reply")
        told = AnsweredHeader.model_validate_json(envelope.answers)
        told = told.model_copy(update={"round": told.round + next(shifts, 0)})
        return bytes(encode_message(envelope.run, envelope.header, envelope.weights, told.model_dump_json()))

    monkeypatch.setattr(host, "answer", lies)
    run = fedstrata.run(there)
    [missing] = lines(run.folder / "missing.jsonl")
    assert (missing["client"], missing["reason"]) == ("b", "answers round 2, but was asked for round 1")
    same(run, replay(run))


def test_a_site_that_is_away_is_missed_by_its_deadline(job: Jobs, village: Village) -> None:
    _, there = jobs(village, job("fedavg", "classify", 1, method={"rounds": 4}), deadline=1.5)

    def watch(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round == 0:
            village.post.out = {"b", "c"}

    run = fedstrata.run(there, progress=watch)
    reasons = {(line["client"], line["reason"]) for line in lines(run.folder / "missing.jsonl")}
    assert reasons == {("b", "is not connected"), ("c", "is not connected")}
    assert [name for name, _ in taken(run)[-1]] == ["a"]
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    assert set(NAMES) >= {name for each in taken(run) for name, _ in each}
