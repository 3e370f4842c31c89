"""A server that asks a site for more than it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import Village

import fedstrata
from attacks.bad_site import header, metadata, metadata_of
from fedstrata.events import Declined, SiteEvent
from fedstrata.sites.messages import (
    Envelope,
    HelloHeader,
    RefusalHeader,
    ReplyHeader,
    RequestHeader,
    StartHeader,
    WelcomeHeader,
    decode_message,
    encode_message,
)
from fedstrata.sites.service import SiteService
from fedstrata.sites.settings import read_site
from fedstrata.wire.foreign import plain_text

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def heard(job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SiteService, dict[type, Envelope]]:
    """A site, new, and what a server said to it before, by the kind of message."""
    village = Village(tmp_path, monkeypatch)
    _, there = village.jobs(job("fedavg", "classify"))
    fedstrata.run(there)
    sent = [
        decode_message(m, "hello", "start", "request", "farewell")
        for n, way, m in village.post.messages
        if n == "a" and way == "down"
    ]
    village.start("a")
    return village.post.hosts["a"], {type(one.header): one for one in reversed(sent)}


def answer(
    host: SiteService, said: Envelope, weights: dict[str, Any] | None = None, run: str = "", **changes: Any
) -> Any:
    header = said.header.model_copy(update=changes)
    message = encode_message(run or said.run, header, said.weights if weights is None else weights)
    return decode_message(host.answer(message), "welcome", "reply", "refusal").header


def text(content: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)


def test_it_knows_no_run_that_did_not_begin(heard: tuple[SiteService, dict[type, Envelope]]) -> None:
    host, said = heard
    for kind in (StartHeader, RequestHeader):
        assert answer(host, said[kind]).reason == "cannot do what it is asked: this run is not known here"
    for run in ("../../../etc", "F" * 32, "f" * 31):
        assert "run: must be 32 hexadecimal digits" in answer(host, said[HelloHeader], run=run).reason


def test_it_takes_part_with_its_own_version_alone(heard: tuple[SiteService, dict[type, Envelope]]) -> None:
    host, said = heard
    told: list[SiteEvent] = []
    host.tell = told.append
    refusal = answer(host, said[HelloHeader], version="99.1")
    assert refusal.reason.startswith("refuses: its FedStrata is ")
    assert "the server's 99.1" in refusal.reason
    assert refusal.final
    assert told == [Declined(said[HelloHeader].run, refusal.reason)], "whoever runs the site reads it too"


def test_another_version_is_named_whatever_else_it_says(heard: tuple[SiteService, dict[type, Envelope]]) -> None:
    """It may tell of a run in other fields; the server was told that the answer is for another run."""
    host, said = heard
    message = header(version="99.1")(bytes(encode_message(said[HelloHeader].run, *said_of(said[HelloHeader]))))
    content = json.dumps({**json.loads(metadata_of(message)["header"]), "later": 1})
    envelope = decode_message(host.answer(metadata(header=content)(message)), "refusal")
    assert isinstance(envelope.header, RefusalHeader)
    assert envelope.header.reason.endswith("the server's 99.1")
    assert envelope.header.final
    assert envelope.run == said[HelloHeader].run


def test_a_request_that_cannot_be_read_is_refused_by_the_name_of_the_field(
    heard: tuple[SiteService, dict[type, Envelope]],
) -> None:
    host, said = heard
    message = bytes(encode_message(said[RequestHeader].run, *said_of(said[RequestHeader])))
    for attack, why in (
        (header(round=-2), "round: must be -1 or more, found -2"),
        (header(span=[0.0, 2.0]), "span, entry 2: must be at most 1, found 2.0"),
        (header(phase="x" * 10**5), "phase: 'xxx"),
    ):
        refusal = decode_message(host.answer(attack(message)), "refusal").header
        assert isinstance(refusal, RefusalHeader)
        assert f"or farewell: {why}" in refusal.reason


@pytest.mark.parametrize("table", ["task", "method", "train", "head", "adapter", "wire", "privacy"])
def test_a_job_whose_tables_are_none_is_no_job(
    heard: tuple[SiteService, dict[type, Envelope]], table: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, said = heard
    job = said[HelloHeader].header.job  # type: ignore[attr-defined]
    for value in (5, None, [], "x"):
        assert answer(host, said[HelloHeader], job={**job, table: value}).reason.startswith("failed: its data")
        assert f"job: {table}: must be a table ([{table}])" in caplog.messages[-1]


def said_of(envelope: Envelope) -> tuple[Any, Any]:
    return envelope.header, envelope.weights


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modeling.py", "import os"),
        ("../../evil.json", "{}"),
        ("config.json", json.dumps({"auto_map": {"A": "b.C"}})),
    ],
)
def test_it_takes_no_code(heard: tuple[SiteService, dict[type, Envelope]], name: str, content: str) -> None:
    host, said = heard
    files = {**said[HelloHeader].weights["files"], name: text(content)}
    refusal = answer(host, said[HelloHeader], {"files": files})
    assert refusal.reason == f"refuses: the model comes with code of its own ({name})"
    assert not list(host.settings.folder.rglob("evil*"))


def test_the_server_does_not_say_which_rows(
    heard: tuple[SiteService, dict[type, Envelope]], tmp_path: Path
) -> None:
    host, said = heard
    (tmp_path / "other.csv").write_text("text,label\n" + "a,kidney\n" * 99)
    hello = said[HelloHeader].header
    assert isinstance(hello, HelloHeader)
    job = {
        **hello.job,
        "data": {"train": str(tmp_path / "other.csv")},
        "model": {"name": "somewhere/else"},
        "clients": {"count": 1},
        "output": {"dir": str(tmp_path / "elsewhere")},
    }
    assert isinstance(answer(host, said[HelloHeader], job=job), WelcomeHeader)
    welcome = answer(host, said[StartHeader])
    assert welcome.examples == 4, "its own rows, whatever the server says"
    assert not (tmp_path / "elsewhere").exists()


def test_a_site_s_files_are_read_as_it_says_and_what_is_found_out_is_logged(
    heard: tuple[SiteService, dict[type, Envelope]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, said = heard
    folder = tmp_path / "federation" / "sites" / "a"
    (folder / "train.csv").write_bytes("label;text\r\nkidney;Größe\r\neye;the eye\r\n;lost\r\n".encode("cp1250"))
    (folder / "own.csv").write_text("text,label\nthe eye,eye\nthe heart,\n,kidney\n", "utf-8")
    settings = (folder / "site.toml").read_text("utf-8").replace('# encoding = "cp1252"', 'encoding = "cp1250"')
    settings = settings.replace('# test = "test.csv"', 'test = "own.csv"')
    (folder / "site.toml").write_text(settings, "utf-8")
    host = SiteService(read_site(folder))
    assert isinstance(answer(host, said[HelloHeader]), WelcomeHeader)
    with caplog.at_level("INFO"):
        assert answer(host, said[StartHeader]).examples == 2
    assert f"{folder / 'train.csv'}: delimiter ';'" in caplog.messages
    lacking = "2 rows without a value in 'label' and 1 row without a value in 'text' dropped"
    assert lacking in caplog.messages, "of the training rows and of its own test rows"
    said_of_rows = [message.partition(": data: ")[2] for message in caplog.messages]
    assert {"2 training rows: a 2", "no text is cut"} <= set(said_of_rows), said_of_rows


def test_a_word_beyond_the_embeddings_is_refused_whoever_has_it(
    heard: tuple[SiteService, dict[type, Envelope]],
) -> None:
    """It was an error in training at the sites that have the word, which told of it past noise and sums."""
    host, said = heard
    for run, word in (("e" * 32, "kidney"), ("f" * 32, "nowhere")):
        table = json.loads(said[HelloHeader].weights["files"]["tokenizer.json"].numpy().tobytes())
        table["model"]["vocab"] = {k: v for k, v in table["model"]["vocab"].items() if k != "kidney"} | {word: 900}
        files = {**said[HelloHeader].weights["files"], "tokenizer.json": text(json.dumps(table))}
        assert isinstance(answer(host, said[HelloHeader], {"files": files}, run), WelcomeHeader)
        assert isinstance(answer(host, said[StartHeader], run=run), RefusalHeader)
        assert isinstance(answer(host, said[RequestHeader], run=run), RefusalHeader)


def test_of_runs_that_came_to_nothing_no_more_than_the_last_stays(
    heard: tuple[SiteService, dict[type, Envelope]],
) -> None:
    """[limits] max_runs counts those in which something left: greetings alone filled the disk without end."""
    host, said = heard
    own = said[HelloHeader].run
    (host.settings.folder / "runs" / own).mkdir()
    (host.settings.folder / "runs" / own / "hello").write_bytes(b"of a run that has answered")
    for number in range(4):
        run = f"{number:032x}"
        assert isinstance(answer(host, said[HelloHeader], run=run), WelcomeHeader)
        assert isinstance(answer(host, said[StartHeader], run=run), WelcomeHeader)
    assert {path.name for path in (host.settings.folder / "runs").iterdir()} == {own, run}
    strange = answer(host, said[HelloHeader], run="e" * 32, version="0")
    assert isinstance(strange, RefusalHeader)
    assert isinstance(answer(host, said[RequestHeader], run=run), ReplyHeader)


def test_the_start_model_is_the_one_that_was_announced(heard: tuple[SiteService, dict[type, Envelope]]) -> None:
    host, said = heard
    answer(host, said[HelloHeader])
    weights = {part: dict(own) for part, own in said[StartHeader].weights.items()}
    weights["head"] = {name: tensor + 1 for name, tensor in weights["head"].items()}
    refusal = answer(host, said[StartHeader], weights)
    assert isinstance(refusal, RefusalHeader)
    assert refusal.reason == "cannot do what it is asked: start model: is not the one that was announced"
    announced = said[StartHeader].weights
    hidden = {**announced, "more": {name: tensor.isnan() for name, tensor in announced["head"].items()}}
    assert answer(host, said[StartHeader], hidden).reason.endswith("more is no part that this site holds")
    del weights["head"]
    assert "names differ from the plan's" in answer(host, said[StartHeader], weights).reason
    assert answer(host, said[StartHeader]).holds


def test_nonsense_is_answered(heard: tuple[SiteService, dict[type, Envelope]]) -> None:
    for message in (b"nonsense", b"\xff" * 100, b"{}"):
        refusal = decode_message(heard[0].answer(message), "refusal").header
        assert isinstance(refusal, RefusalHeader)
        assert refusal.reason.startswith("cannot do what it is asked: not a hello or start or request")


def test_a_run_s_name_of_half_a_character_is_refused(heard: tuple[SiteService, dict[type, Envelope]]) -> None:
    host, said = heard
    message = bytes(encode_message("0" * 32, *said_of(said[RequestHeader])))
    refusal = decode_message(host.answer(metadata(run="\ud800")(message)), "refusal").header
    assert refusal == RefusalHeader(
        reason="cannot do what it is asked: run: must be 32 hexadecimal digits", final=False
    )


@pytest.mark.parametrize(
    "name", ["\ud800", "\x1b[31m\nred", "x" * 100_000], ids=["half a character", "escapes", "long"]
)
def test_a_refusal_is_one_plain_line_whatever_it_refuses(
    heard: tuple[SiteService, dict[type, Envelope]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of half a character no refusal could be made: the site fetched the same message again for five minutes."""
    host, said = heard
    answer(host, said[HelloHeader])
    answer(host, said[StartHeader])
    message = bytes(encode_message(said[RequestHeader].run, said[RequestHeader].header))
    size = int.from_bytes(message[:8], "little")
    table = json.loads(message[8 : 8 + size])
    table["__metadata__"]["parts"] = '["head"]'
    table[f"head|{name}"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    head = json.dumps(table).encode()
    refusal = decode_message(host.answer(len(head).to_bytes(8, "little") + head), "refusal").header
    assert isinstance(refusal, RefusalHeader)
    assert refusal.reason.startswith("cannot do what it is asked: names differ from the plan's: ")
    assert refusal.reason == plain_text(refusal.reason)
    line = caplog.messages[-1].partition(": ")[2]
    assert line.startswith(refusal.reason), "and so is the line of the site's log"
    assert line == plain_text(line, len(line))
