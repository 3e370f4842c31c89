"""Masked sums between sites: the same bits as in process, whoever dies between two messages, and no other keys."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import Village, lines, same, weights, without_its_disk

import fedstrata
from fedstrata import UserError
from fedstrata.client.sums import SUM_FILES
from fedstrata.plan.messages import Request
from fedstrata.privacy.masked_sums import Member
from fedstrata.privacy.opening import Opening
from fedstrata.privacy.roster import Entry
from fedstrata.runs import stages
from fedstrata.server.state import fingerprint
from fedstrata.sites.engine import RemoteEngine
from fedstrata.sites.lost import NOTHING
from fedstrata.sites.messages import HelloHeader, decode_message, encode_message, metadata_of
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]
NAMES = ("a", "b", "c", "d", "e")
PHASES = ("sum_keys", "sum_shares", "train", "sum_survivors", "sum_open")
SUMS = {"privacy": {"sum_only": True}}


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch, NAMES)


def phase_of(message: bytes) -> str:
    envelope = decode_message(message, "hello", "start", "request", "farewell")
    return getattr(envelope.header, "phase", "")


CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedbt", {"method": {"cycle": 2}, "wire": {"dtype": "fp16"}}),
    ("fedadam", {"clients": {"fraction": 0.6}, "method": {"rounds": 4}}),
    ("fedsplitbert", {"clients": {"test": 0.3}, "method": {"rounds": 3}}),
]


@pytest.mark.parametrize(("name", "tables"), CASES)
def test_between_sites_masked_sums_come_to_the_same_bits(
    job: Jobs, village: Village, name: str, tables: dict[str, Any]
) -> None:
    here, there = village.jobs(job(name, "classify", 3, **tables, **SUMS))
    same(fedstrata.run(here), fedstrata.run(there))


def test_of_a_masked_sum_a_loss_is_told_once_and_of_nobody_else(job: Jobs, village: Village) -> None:
    tables = {**SUMS, "train": {"optimizer_state": "persist"}, "method": {"rounds": 4}}
    _, there = village.jobs(job("fedavg", "classify", 1, **tables))
    run = fedstrata.run(there, progress=without_its_disk(village, 0))
    assert [(line["client"], line["round"]) for line in lines(run.folder / "lost.jsonl")] == [("c", 0)]


def test_a_limit_of_bytes_counts_the_integers_that_travel_and_is_told_before_the_run(
    job: Jobs, village: Village
) -> None:
    _, there = village.jobs(job("fedavg", "classify", 3, wire={"dtype": "fp16"}, **SUMS))
    village.site("b", "# bytes_per_round = 500_000_000", "bytes_per_round = 100_000")
    missing = lines(fedstrata.run(there).folder / "missing.jsonl")
    assert {line["client"] for line in missing} == {"b"}
    assert all(line["reason"].startswith("refuses: round 1 sends 12") for line in missing), "four bytes a number"


class Trouble:
    """Does something when a site is about to be brought a message of a phase, or its answer is brought back."""

    def __init__(self, village: Village, site: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.village, self.site, self.phase, self.done = village, site, phase, False
        monkeypatch.setattr("fedstrata.sites.engine.RETRY_SECONDS", 0.02)

    def due(self, name: str, message: bytes) -> bool:
        found = not self.done and name == self.site and phase_of(message) == self.phase
        self.done |= found
        return found


class Gone(Trouble):
    """The site is not there any more."""

    def install(self) -> None:
        post, send = self.village.post, self.village.post.send

        def sending(to: Any, message: Any, seconds: float, size: int) -> str:
            name = list(post.hosts)[to[0]]
            number = send(to, message, seconds, size)
            if self.due(name, bytes(message)):
                post.out.add(name)
                del post.waiting[number]
            return number

        def receiving(numbers: Any, receive: Any = post.receive) -> Iterator[Any]:
            yield from receive([number for number in numbers if number in post.waiting])

        post.send, post.receive = sending, receiving  # type: ignore[method-assign]


class Restarted(Trouble):
    """The site has answered, ends before its answer is brought, and starts again."""

    def install(self) -> None:
        post, receive = self.village.post, self.village.post.receive

        def receiving(numbers: Any) -> Iterator[Any]:
            due = {n: self.due(post.waiting[n][0], post.waiting[n][1]) for n in numbers}
            for number, answer in receive(numbers):
                if due[number]:
                    self.village.start(self.site)
                yield number, None if due[number] else answer

        post.receive = receiving  # type: ignore[method-assign]


def one_round(job: Jobs, village: Village, **engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return village.jobs(job("fedavg", "classify", 1, method={"rounds": 1}, **SUMS), **engine)


IN_PROCESS: dict[str, dict[str, torch.Tensor]] = {}


def in_process(village: Village, job: Jobs, names: str = "abcde") -> dict[str, torch.Tensor]:
    """The weights of one round in process over the rows of some sites; the same in every test."""
    if names not in IN_PROCESS:
        rows = [(*row, NAMES[i % len(NAMES)]) for i, row in enumerate(SENTENCES)]
        village.write("all.csv", ["text", "label", "site"], [row for row in rows if row[2] in names])
        here, _ = one_round(job, village)
        IN_PROCESS[names] = weights(fedstrata.run(here))
    return IN_PROCESS[names]


@pytest.mark.parametrize("phase", PHASES)
def test_a_site_that_is_gone_between_two_messages_costs_its_own_share_at_most(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    Gone(village, "c", phase, monkeypatch).install()
    events: list[Any] = []
    _, there = one_round(job, village, deadline=0.6, quorum=0.8)
    run = fedstrata.run(there, progress=events.append)
    late = phase in ("sum_survivors", "sum_open")
    expected = in_process(village, job, "abcde" if late else "abde")
    assert all(torch.equal(weights(run)[key], expected[key]) for key in expected)
    missing = [e for e in events if type(e).__name__ == "Missed" and e.client == "c"]
    assert len(missing) == 1
    assert missing[0].reason.endswith("after its changes had arrived") == late


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "train"])
def test_a_site_that_starts_again_between_two_messages_goes_on(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    Restarted(village, "c", phase, monkeypatch).install()
    _, there = one_round(job, village)
    other, expected = fedstrata.run(there), in_process(village, job)
    assert all(torch.equal(weights(other)[key], expected[key]) for key in expected)
    assert not (other.folder / "missing.jsonl").exists()


def test_numbers_that_may_have_left_are_not_masked_a_second_time(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    Restarted(village, "c", "train", monkeypatch).install()
    _, there = one_round(job, village, quorum=0.8)
    run = fedstrata.run(there)
    [line] = lines(run.folder / "missing.jsonl")
    assert (line["client"], line["reason"]) == (
        "c",
        "cannot do what it is asked: masked sum: its numbers have been sent",
    )


def killed_in_round(number: int, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose server dies when it has opened the sum of a round, before it is written down."""
    commit = stages.state.RunState.commit

    def dies(*args: Any) -> None:
        if args[3] == number:
            raise RuntimeError("killed")
        commit(*args)

    with monkeypatch.context() as patched:
        patched.setattr(stages.state.RunState, "commit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            fedstrata.run(job)


def test_a_server_that_was_killed_after_opening_goes_on_to_the_same_bits(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job("fedavg", "classify", 3, **SUMS)
    config["method"]["rounds"] = 3
    here, there = village.jobs(config)
    whole = fedstrata.run(here)
    killed_in_round(2, there, monkeypatch)
    village.start()
    same(whole, fedstrata.run(there, resume=True))


def test_a_round_that_is_asked_for_again_does_not_begin_with_damaged_moments(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job("fedavg", "classify", 1, **SUMS)
    config["train"]["optimizer_state"] = "persist"
    _, there = village.jobs(config, quorum=0.5)
    killed_in_round(2, there, monkeypatch)
    [path] = village.folder.glob("federation/sites/b/state/runs/*/optimizer/round-000000.safetensors")
    before = path.read_bytes()
    path.write_bytes(before[:-2] + bytes([before[-2] ^ 64]) + before[-1:])
    village.start()
    with pytest.raises(UserError, match="do not fit together, so it cannot be opened"):  # it was, with b's changes
        fedstrata.run(there, resume=True)
    assert "b refuses: what it keeps of this run is damaged; its own log says more" in "".join(
        f"{line['client']} {line['reason']}" for line in lines(Path(there["output"]["dir"]) / "missing.jsonl")
    )
    path.write_bytes(before)
    village.start()
    assert fedstrata.run(there, resume=True).status == "finished"


def test_secrets_of_a_sum_are_readable_by_the_site_s_user_alone(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the moment either in which they are written: with its keys a server takes a site's mask away."""
    modes, replace_file = list[int](), os.replace

    def seen(part: Path, path: Path) -> None:
        if path.name in SUM_FILES:
            modes.append(path.parent.stat().st_mode & part.stat().st_mode & 0o077)
        replace_file(part, path)

    monkeypatch.setattr(os, "replace", seen)
    fedstrata.run(one_round(job, village)[1])
    assert len(modes) > len(NAMES)
    assert set(modes) == {0}


@pytest.mark.parametrize("damaged", [False, True])
def test_of_one_round_no_sum_of_others_is_opened(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """A server asks for a round again, without one of the sites: the difference would be that site's changes."""
    _, there = one_round(job, village, deadline=0.6, quorum=0.5)
    commit = stages.state.RunState.commit

    def dies(*args: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(stages.state.RunState, "commit", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there)
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    notes = list(village.folder.glob("federation/sites/*/state/runs/*/sums/opened.json"))
    before = [path.read_text() for path in notes]
    assert len(notes) == len(village.names)
    for path, text in zip(notes, before, strict=True):
        path.write_text(text.replace('"0"', '"1"') if damaged else text)
    village.post.out = {"c"}
    with pytest.raises(UserError, match="do not fit together, so it cannot be opened"):
        fedstrata.run(there, resume=True)
    for path, text in zip(notes, before, strict=True):
        path.write_text(text)
    village.post.out = set()
    fedstrata.run(there, resume=True)


def test_with_fewer_than_the_threshold_the_run_stops_and_resume_goes_on(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = one_round(job, village, deadline=0.6, quorum=0.4)
    expected = in_process(village, job)
    Gone(village, "e", "sum_survivors", monkeypatch).install()
    Gone(village, "d", "sum_open", monkeypatch).install()
    with pytest.raises(UserError, match=r"round 1: masked sum: .*; --resume asks the clients again"):
        fedstrata.run(there)
    village.post.out = set()
    found = weights(fedstrata.run(there, resume=True))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_with_nobody_left_to_open_a_sum_the_run_stops_with_a_sentence(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three all must be left: the two others sign no list of two. The run ended with an IndexError."""
    village = Village(tmp_path, monkeypatch, NAMES[:3])
    Gone(village, "c", "train", monkeypatch).install()
    _, there = one_round(job, village, deadline=0.6, quorum=0.6)
    reason = "the shares of 0 clients do not fit together, so it cannot be opened; expected those of 3 of the 3"
    with pytest.raises(UserError, match=f"round 1: masked sum: {reason} that began; --resume asks"):
        fedstrata.run(there)
    village.post.out = set()
    assert fedstrata.run(there, resume=True).status == "finished"


def test_a_site_adds_to_no_sum_with_a_key_that_it_does_not_know(job: Jobs, village: Village) -> None:
    """The server plays two sites of its own making; without a third that is known nothing is opened."""
    for name in "ab":
        peers = village.folder / "federation" / "sites" / name / "peers"
        (peers / "c.pub").write_bytes((peers / "d.pub").read_bytes())
        (peers / "e.pub").unlink()
    village.start()
    events: list[Any] = []
    _, there = one_round(job, village, quorum=0.4)
    with pytest.raises(UserError, match="masked sum"):
        fedstrata.run(there, progress=events.append)
    reasons = {e.client: e.reason for e in events if type(e).__name__ == "Missed"}
    assert "what came as 'c' is not signed with its registered key" in reasons["a"]


class Sums:
    """What the members of sums have brought to them, and what was opened of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own, self.opened = list[dict[str, Any]](), list[tuple[Any, tuple[str, ...]]]()
        masked, result, roster = Member.masked, Opening.result, Opening.close_roster

        def begun(opening: Opening, groups: Any) -> Any:
            self.own.append({})
            return roster(opening, groups)

        def noted(member: Member, question: Any, numbers: Any) -> Any:
            self.own[-1][member.name] = numbers[0] * member.secrets.weight
            return masked(member, question, numbers)

        def seen(opening: Opening) -> Any:
            made = result(opening)
            self.opened.append((opening.roster.fixed.signed(made[0][0]), made[0][1]))
            return made

        monkeypatch.setattr(Opening, "close_roster", begun)
        monkeypatch.setattr(Member, "masked", noted)
        monkeypatch.setattr(Opening, "result", seen)

    def alike(self, round: int) -> list[bool]:
        """Which numbers of a sum are those that were brought to it."""
        found, names = self.opened[round]
        plain = sum(self.own[round][name] for name in names)
        return [one == other for one, other in zip(found.tolist(), plain.tolist(), strict=True)]


def test_masks_of_who_drops_out_are_taken_away_in_later_rounds_too(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sites began with is then a part as the way down has rounded it."""
    sums = Sums(monkeypatch)

    def watch(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round == 0:
            Gone(village, "c", "train", monkeypatch).install()

    made = job("fedbt", "classify", 3, wire={"dtype": "fp16"}, **SUMS)
    fedstrata.run(village.jobs(made, deadline=0.6, quorum=0.8)[1], progress=watch)
    assert [names for _, names in sums.opened] == [NAMES, ("a", "b", "d", "e")]
    assert all(sums.alike(0) + sums.alike(1))


@pytest.mark.parametrize("what", ["model", "rate", "none"])
def test_no_sum_opens_of_sites_that_were_sent_different_things(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """From zeros next to nothing is learned, nor at the end of a schedule: the sum would be the changes of a."""
    exchange, sums = RemoteEngine.exchange, Sums(monkeypatch)

    def changed(request: Request) -> Request:
        if request.client == "a" or request.phase != "train" or what == "none":
            return request
        if what == "rate":
            return replace(request, span=(0.999, 1.0))
        [run] = village.post.hosts["a"].runs.values()
        assert run.parts
        shapes = run.parts.shapes
        zeros = {part: {n: torch.zeros(s) for n, s in shapes[part].items()} for part in request.versions}
        return replace(request, versions=dict.fromkeys(request.versions, 1), parts=zeros)

    def asking(engine: RemoteEngine, requests: Any) -> Iterator[Any]:
        yield from exchange(engine, [changed(request) for request in requests])

    monkeypatch.setattr(RemoteEngine, "exchange", asking)
    monkeypatch.setattr("fedstrata.sites.site.check_span", lambda *_: None)  # which refuses the other rate before
    made = job("fedavg", "classify", 1, method={"rounds": 1}, train={"lr_schedule": "polynomial"}, **SUMS)
    with suppress(UserError):  # what was opened is no model
        fedstrata.run(village.jobs(made)[1])
    assert sums.opened[0][1] == NAMES
    assert all(sums.alike(0)) if what == "none" else not any(sums.alike(0))


def test_sites_that_were_sent_different_start_models_add_to_no_sum(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of its own a site begins from it too: below a head of zeros nothing is learned."""
    sums, post, send = Sums(monkeypatch), village.post, village.post.send

    def sending(to: Any, message: Any, seconds: float, size: int) -> str:
        content = bytes(message)
        if list(post.hosts)[to[0]] != "a" and metadata_of(content)["kind"] in ("hello", "start"):
            envelope = decode_message(content, "hello", "start")
            header, weights = envelope.header, envelope.weights
            if isinstance(header, HelloHeader):
                header = header.model_copy(update={"start": fingerprint(zeros)})
            else:
                weights = zeros
            message = encode_message(envelope.run, header, weights)
        return send(to, message, seconds, size)

    made = village.jobs(job("fedsplitbert", "classify", clients={"test": 0.3}, method={"rounds": 1}, **SUMS))[1]
    begun = stages.start_weights

    def noted(runtime: Any) -> Any:
        found = begun(runtime)
        zeros.update({part: {n: t * (part != "head") for n, t in own.items()} for part, own in found.items()})
        return found

    zeros: dict[str, dict[str, torch.Tensor]] = {}
    monkeypatch.setattr(stages, "start_weights", noted)
    monkeypatch.setattr(post, "send", sending)
    monkeypatch.setattr("fedstrata.sites.engine.check_answered", lambda *_: NOTHING)
    with suppress(UserError):
        fedstrata.run(made)
    assert zeros
    assert not sums.opened


@pytest.mark.parametrize("what", ["alike", "none"])
def test_a_site_with_keys_that_are_none_is_missing_and_not_all_the_others(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Every other site stops at such keys, so that one of them ended every run."""
    entry = Member._entry

    def bad(member: Member) -> Entry:
        own = entry(member)
        spoilt = own.mask if what == "alike" else bytes(32)  # two keys that are one, or a point of low order
        return replace(own, box=spoilt) if member.name == "c" else own

    monkeypatch.setattr(Member, "_entry", bad)
    _, there = one_round(job, village, quorum=0.8)
    run, expected = fedstrata.run(there), in_process(village, job, "abde")
    assert all(torch.equal(weights(run)[key], expected[key]) for key in expected)
    [line] = lines(run.folder / "missing.jsonl")
    assert line["client"] == "c"
    assert line["reason"].startswith("sends what cannot be used: keys: ")


def test_no_message_holds_a_change_in_clear(job: Jobs, village: Village) -> None:
    """Every byte value of the masked parts is about equally frequent; of floats the exponents are not."""
    _, there = one_round(job, village)
    fedstrata.run(there)
    for _, way, message in village.post.messages:
        if way == "up" and b'"kind":"reply"' in message and len(message) > 50_000:
            counts = torch.bincount(
                torch.frombuffer(bytearray(message[-50_000:]), dtype=torch.uint8), minlength=256
            )
            expected = counts.sum() / 256
            assert float(((counts - expected) ** 2 / expected).sum()) < 400
            assert json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])["__metadata__"]
