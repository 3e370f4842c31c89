"""Whom an answer belongs to, and what becomes of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedstrata.events import Awaited, Waiting
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.server.records import FileRecords
from fedstrata.sites import engine as sites
from fedstrata.sites.engine import Presence, RemoteEngine, RemoteRun
from fedstrata.sites.messages import (
    HelloHeader,
    RefusalHeader,
    RequestHeader,
    StartHeader,
    WelcomeHeader,
    decode_message,
    decode_request,
    encode_message,
    encode_reply,
)
from fedstrata.wire.tensor_file import TensorFile
from pages import DOCS

RUN = "f" * 32
NAMES = ("a", "b")
Answers = Callable[["Script", str, str], Iterable[tuple[str, bytes | None]]]


def honest(name: str, message: bytes) -> bytes:
    """What a site answers."""
    envelope = decode_message(message, "hello", "start", "request")
    header = envelope.header
    if isinstance(header, RequestHeader):
        reply = Reply(name, 1, loss=0.5 if name == "a" else 0.25)
        return bytes(encode_reply(RUN, reply, decode_request(envelope), "start"))
    return bytes(encode_message(RUN, WelcomeHeader(examples=1, holds=isinstance(header, StartHeader))))


class Script:
    """A transport whose answers to the first request of ``b`` are scripted; everything else goes well."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.there: dict[str, Presence] = {"a": (1, "start"), "b": (2, "start")}
        self.sent: dict[str, tuple[str, bytes]] = {}
        self.done: set[str] = set()
        self.rounds = 0

    def online(self) -> dict[str, Presence]:
        return dict(self.there)

    def send(self, to: Presence, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        number = f"m{len(self.sent)}"
        self.sent[number] = {1: "a", 2: "b"}[to[0]], bytes(message)
        return number

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def requests(self, name: str) -> list[str]:
        """Numbers of the requests sent to a site."""
        return [n for n, (to, m) in self.sent.items() if to == name and b'"kind":"request"' in m]

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        self.rounds += 1
        for number in list(numbers):
            name, message = self.sent[number]
            if number in self.requests("b")[:1]:
                yield from self.answers(self, number, name)
            else:
                yield number, honest(name, message)


def engine(transport: Script, folder: Path, events: list[Any], deadline: float = 5.0) -> RemoteEngine:
    header = HelloHeader(version="0", stage="", job={}, long_text=None, share=0.0, labels=None, start="")
    return RemoteEngine(
        run=RemoteRun(
            id=RUN,
            names=NAMES,
            hello=lambda name: encode_message(RUN, header),
            start=lambda: encode_message(RUN, StartHeader()),
            check=lambda request, reply: None,
            answer_bytes=lambda request, examples: 0,
            start_digest="start",
        ),
        transport=transport,
        deadline=deadline,
        records=FileRecords(folder),
        on_event=events.append,
    )


def ask(*names: str) -> list[Request]:
    return [Request(0, name, Plan((0,), ("head",)), "train", {}, {}) for name in names]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(sites, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(sites, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sites, "REPORT_SECONDS", 0.1)
    return []


def losses(answers: Iterable[Reply | NoReply]) -> dict[str, Any]:
    return {answer.client: answer.loss if isinstance(answer, Reply) else answer.reason for answer in answers}


def test_every_site_is_greeted_once_and_sent_the_start_model_once(events: list[Any], tmp_path: Path) -> None:
    transport = Script(lambda script, number, name: [(number, honest(name, script.sent[number][1]))])
    remote = engine(transport, tmp_path, events)
    assert remote.gather() == []
    kinds = [decode_message(m, "hello", "start", "request").header for _, m in transport.sent.values()]
    assert [type(kind) for kind in kinds].count(HelloHeader) == 2
    assert [type(kind) for kind in kinds].count(StartHeader) == 2
    for _ in range(2):
        assert losses(remote.exchange(ask("b", "a"))) == {"a": 0.5, "b": 0.25}
    assert len(transport.sent) == 8


def test_the_seconds_stand_with_what_comes_up_as_the_page_says(events: list[Any], tmp_path: Path) -> None:
    """The page said that a message has the seconds until its reply."""
    transport = Script(lambda script, number, name: [(number, honest(name, script.sent[number][1]))])
    remote = engine(transport, tmp_path, events)
    remote.gather()
    list(remote.exchange(ask("a", "b")))
    lines = remote.records.lines("transport")
    assert {(line["direction"], line["seconds"] is None) for line in lines} == {("up", False), ("down", True)}
    assert {line["round"] for line in lines} == {-1, 0}
    page = (DOCS / "output-files.md").read_text("utf-8")
    [said] = [line for line in page.splitlines() if line.startswith("| `transport.jsonl` |")]
    assert "of what comes `up` the `seconds` since it was asked for, null of what goes `down`" in said
    assert "`round` (−1 outside of the rounds)" in said


def test_a_site_that_comes_late_is_greeted_before_its_first_request(events: list[Any], tmp_path: Path) -> None:
    transport = Script(lambda script, number, name: [(number, honest(name, script.sent[number][1]))])
    del transport.there["b"]
    remote = engine(transport, tmp_path, events, deadline=0.3)
    assert remote.gather() == [NoReply("b", "is not connected")]
    transport.there["b"] = 2, "later"
    assert losses(remote.exchange(ask(*NAMES))) == {"a": 0.5, "b": 0.25}
    assert [type(e) for e in events if not isinstance(e, Awaited)] == [Waiting]


def test_it_is_told_who_is_waited_for_and_how_long(events: list[Any], tmp_path: Path) -> None:
    transport = Script(lambda script, number, name: [(number, honest(name, script.sent[number][1]))])
    del transport.there["b"]
    remote = engine(transport, tmp_path, events, deadline=0.3)
    remote.gather()
    waits = [event for event in events if isinstance(event, Awaited)]
    assert [(wait.round, wait.clients) for wait in waits] == [(-1, NAMES), (-1, ("b",))]
    assert all(0 < wait.seconds <= 0.3 for wait in waits)


def lost_once(script: Script, number: str, name: str) -> Iterable[tuple[str, bytes | None]]:
    yield number, None


def twice(script: Script, number: str, name: str) -> Iterable[tuple[str, bytes | None]]:
    answer = honest(name, script.sent[number][1])
    yield from [(number, answer), (number, answer)]


def for_nobody(script: Script, number: str, name: str) -> Iterable[tuple[str, bytes | None]]:
    yield from [("m99", b""), (number, honest(name, script.sent[number][1]))]


def after_a_restart(script: Script, number: str, name: str) -> Iterable[tuple[str, bytes | None]]:
    script.there["b"] = 2, "again"
    return ()


@pytest.mark.parametrize("answers", [lost_once, twice, for_nobody, after_a_restart])
def test_errors_duplicates_and_restarts_are_mapped_to_their_site(
    events: list[Any], tmp_path: Path, answers: Answers
) -> None:
    transport = Script(answers)
    remote = engine(transport, tmp_path, events)
    remote.gather()
    assert losses(remote.exchange(ask(*NAMES))) == {"a": 0.5, "b": 0.25}
    assert len(transport.requests("a")) == 1, "who has answered is not asked again"
    assert len(transport.requests("b")) == (2 if answers in (lost_once, after_a_restart) else 1)


def test_an_answer_after_the_deadline_is_nobodys(events: list[Any], tmp_path: Path) -> None:
    transport = Script(lambda script, number, name: [])
    remote = engine(transport, tmp_path, events, deadline=0.3)
    remote.gather()
    assert losses(remote.exchange(ask(*NAMES))) == {"a": 0.5, "b": "did not answer in time"}
    transport.answers = lambda script, number, name: [
        (number, encode_reply(RUN, Reply("b", 1, loss=99.0), *ask("b"), "start"))
    ]
    assert losses(remote.exchange(ask(*NAMES))) == {"a": 0.5, "b": 0.25}, "the next request has its own answer"


def test_who_is_away_is_waited_for_once(events: list[Any], tmp_path: Path) -> None:
    transport = Script(lambda script, number, name: [])
    remote = engine(transport, tmp_path, events, deadline=0.5)
    remote.gather()
    del transport.there["b"]
    assert losses(remote.exchange(ask(*NAMES)))["b"] == "is not connected"
    before = transport.rounds
    assert losses(remote.exchange(ask(*NAMES)))["b"] == "is not connected"
    assert transport.rounds - before <= 2


class Layers:
    """In place of the activation server: whose turns are not waited for."""

    def __init__(self) -> None:
        self.late: list[set[str]] = []

    def expect(self, requests: Any, tokens: Any, late: Iterable[str]) -> None:
        self.late.append(set(late))

    def check_held(self, request: Request) -> None:
        pass

    def drop(self, client: str) -> None:
        pass


def test_the_layers_at_the_server_do_not_wait_for_who_was_away_before(events: list[Any], tmp_path: Path) -> None:
    transport = Script(lambda script, number, name: [])
    remote, layers = engine(transport, tmp_path, events, deadline=0.3), Layers()
    remote.activation_server = layers  # type: ignore[assignment]
    remote.gather()
    split = [Request(0, name, Plan((0,), ("head",), server=("layer.0",)), "train", {}, {}) for name in NAMES]
    del transport.there["b"]
    for _ in range(2):
        assert losses(remote.exchange(split)) == {"a": 0.5, "b": "is not connected"}
    assert layers.late == [set(), {"b"}]


def test_a_final_refusal_is_not_asked_again(events: list[Any], tmp_path: Path) -> None:
    def refuses(final: bool) -> Answers:
        return lambda script, number, name: [
            (number, encode_message(RUN, RefusalHeader(reason="refuses: so", final=final)))
        ]

    for final, requests in ((True, 1), (False, 2)):
        transport = Script(refuses(final))
        remote = engine(transport, tmp_path, events)
        remote.gather()
        assert losses(remote.exchange(ask(*NAMES)))["b"] == "refuses: so"
        again = losses(remote.exchange(ask(*NAMES)))["b"]
        assert again == ("refuses: so" if final else 0.25)
        assert len(transport.requests("b")) == requests


def test_a_site_that_was_started_again_is_asked_again(events: list[Any], tmp_path: Path) -> None:
    refusal = encode_message(RUN, RefusalHeader(reason="refuses: so", final=True))
    transport = Script(lambda script, number, name: [(number, refusal)])
    remote = engine(transport, tmp_path, events)
    remote.gather()
    assert losses(remote.exchange(ask(*NAMES)))["b"] == "refuses: so"
    there = transport.there.pop("b")
    assert losses(remote.exchange(ask(*NAMES)))["b"] == "refuses: so", "it is away, and has said why"
    transport.there["b"] = there[0], "again"
    assert losses(remote.exchange(ask(*NAMES)))["b"] == 0.25
