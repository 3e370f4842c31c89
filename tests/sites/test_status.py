"""What is seen of a federation while a run goes on: the record, the status, the live page."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock
from test_in_memory import Jobs, Village, village
from typer.testing import CliRunner

import fedstrata
from fedstrata import UserError
from fedstrata.cli import app
from fedstrata.events import (
    Answered,
    Asked,
    Awaited,
    Event,
    Missed,
    Replied,
    RoundEnded,
    RunEnded,
    Scored,
    SiteEvent,
    StageEnded,
    StageStarted,
    Stepped,
)
from fedstrata.job.file import load
from fedstrata.reports import live
from fedstrata.sites import flower, page_server
from fedstrata.sites.certificates import make_certificates
from fedstrata.sites.control_secret import read_secret
from fedstrata.sites.page_server import PageServer
from fedstrata.sites.provision import init
from fedstrata.sites.run_record import RUN_LOCK, RunTeller, read_record, recorded
from fedstrata.sites.settings import read_server
from fedstrata.sites.status import Fresh, federation_status

__all__ = ["village"]
METHOD = {"name": "fedavg", "rounds": 3}
EVENTS: list[Event] = [
    Awaited(-1, ("a", "b"), 60.0),
    StageStarted("", "fedavg", 3, 1, {"a": 4, "b": 4}, ()),
    Awaited(1, ("a", "b", "c"), 60.0),
    Stepped(1, "a", 1, 4, 0.5, 2),
    Replied(1, "a", 0.5, 4, 2.0, 100),
    Missed(1, "c", "is not connected"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    init(tmp_path / "federation", ["a", "b", "c"])
    return tmp_path / "federation"


def teller(home: Path, events: list[Event], **tables: Any) -> RunTeller:
    job = {"model": {"name": "x"}, "task": {"kind": "mlm"}, "data": {"train": "x.txt"}, "method": METHOD}
    told = RunTeller(home, home.parent / "run", load({**job, **tables}), lambda event: None)
    for event in events:
        told(event)
    return told


def test_a_run_keeps_its_record(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify"))
    seen: list[Any] = []
    home = village.folder / "federation"

    def watch(event: Event) -> None:
        seen.append((type(event).__name__, read_record(home)))

    run = fedstrata.run(there, progress=watch)
    waits = [record for kind, record in seen if kind == "Awaited"]
    assert (waits[0].round, waits[0].waiting, waits[0].method) == (-1, ["a", "b", "c"], "fedavg")
    replies = [(record.round, len(record.sites)) for kind, record in seen if kind == "Replied"]
    assert replies == [(0, 1), (0, 2), (0, 3), (1, 3), (1, 3), (1, 3)]
    record = read_record(home)
    assert record is not None
    assert (record.status, record.round, record.rounds, record.waiting) == ("finished", 2, 2, [])
    assert (record.output, record.score, record.scored) == (str(run.folder), run.score, 1)


def test_of_a_run_with_noise_the_status_names_epsilon(job: Jobs, village: Village) -> None:
    noise = {"level": "client", "noise": 8.0, "single_message": True}
    run = fedstrata.run(village.jobs(job("fedavg", "classify", privacy=noise))[1])
    record = read_record(village.folder / "federation")
    assert record is not None
    assert (record.epsilon, record.delta) == (run.privacy["epsilon"], run.privacy["delta"])
    said = live.facts(status() | {"run": record.model_dump()})
    assert said["epsilon"] == f"{record.epsilon:.3g} of a site at most after all rounds (delta 1e-05)"
    assert "epsilon" not in live.facts(status())


def test_a_site_reports_its_own_work(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify"))
    told: list[SiteEvent] = []
    village.post.hosts["b"].tell = told.append
    fedstrata.run(there)
    [name] = {event.run for event in told if not isinstance(event, Answered)}
    work = [event for at in (0, 1) for event in (Asked(name, "fedavg", "train", at, 2), Answered(failed=False))]
    assert told == [*work, RunEnded(name)]


def test_the_record_says_who_is_waited_for(home: Path) -> None:
    record = teller(home, EVENTS).record
    assert read_record(home) == record
    assert (record.round, record.waiting) == (1, ["b"])
    assert record.until is not None
    assert record.until - record.began == pytest.approx(60, abs=5)
    assert record.sites["a"].loss == 0.5
    assert record.sites["c"].missing == "is not connected"
    assert stat.S_IMODE((home / "run.json").stat().st_mode) == 0o600
    later = [Replied(1, "b", float("nan"), 4, 2.0, 100), Scored(1, {"f1": 0.5, "x": float("inf")})]
    record = teller(home, [*EVENTS, *later, RoundEnded(1, 30.0)]).record
    assert (record.round, record.waiting, record.until, record.score) == (2, [], None, {"f1": 0.5})
    assert record.ends is not None
    assert record.sites["b"].loss is None
    assert read_record(home) == record


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (None, "finished", ""),
        (KeyboardInterrupt(), "stopped", ""),
        (UserError("too few sites"), "failed", "too few sites"),
        (OSError(errno.ENOSPC, "No space left on device", "x.json"), "failed", "x.json: No space left on device"),
        (ZeroDivisionError("of ours"), "failed", "ZeroDivisionError"),
    ],
)
def test_each_stage_has_its_record_and_each_end_its_word(
    home: Path, error: BaseException | None, status: str, message: str
) -> None:
    methods = {"one": METHOD, "two": {"name": "fedbt", "rounds": 7}}
    stages = [{"name": name, "task": {"kind": "mlm"}, "method": method} for name, method in methods.items()]
    jobs = load({"model": {"name": "x"}, "data": {"train": "x.txt"}, "stages": stages})
    records: list[Any] = []

    def run() -> None:
        with recorded(home, home, jobs, lambda event: None) as tell:
            tell(StageEnded("one", True))
            records.append(read_record(home))
            if error:
                raise error

    with pytest.raises(type(error)) if error else nullcontext():
        run()
    [before], after = records, read_record(home)
    assert (before.stage, before.method, before.rounds, before.round) == ("two", "fedbt", 7, -1)
    assert before.status == "running"
    assert after is not None
    assert (after.status, after.message) == (status, message)


def test_a_run_does_not_end_because_its_federations_folder_is_gone(tmp_path: Path) -> None:
    teller(tmp_path / "gone", EVENTS).end("finished", "")
    assert read_record(tmp_path / "gone") is None
    (tmp_path / "run.json").write_text('{"output": 1}')
    assert read_record(tmp_path) is None


def test_a_killed_run_is_known_by_its_lock(home: Path) -> None:
    teller(home, EVENTS)
    settings = read_server(home)
    with FileLock(home / RUN_LOCK):
        assert federation_status(settings, False)["run"]["status"] == "running"
    killed = federation_status(settings, False)
    assert killed["run"]["status"] == "killed"
    assert "killed; --resume goes on" in live.facts(killed)["run"]
    assert (killed["run"]["waiting"], killed["run"]["until"], killed["run"]["ends"]) == ([], None, None)
    assert not any("waited for" in word for _, _, word in live.rows(killed))


def test_the_status_says_which_certificate_is_none(home: Path) -> None:
    """It was a system error without the file's name."""
    read_secret(home)
    (home / "tls" / "ca.pem").write_text("hello")
    found = json.loads(CliRunner().invoke(app, ["federation", "status", str(home), "--json"]).stdout)
    assert found["server"]["message"] == f"tls: ca: {home / 'tls' / 'ca.pem'} holds no certificate in PEM form"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of what Flower builds its app with
def test_a_server_that_shows_the_certificate_of_before_is_to_be_restarted(home: Path) -> None:
    """It was said not to answer, and a run told to start it, which had been running all the time."""
    read_secret(home)
    before = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    before.load_cert_chain(home / "tls" / "server.pem", home / "tls" / "server.key")
    new = make_certificates("127.0.0.1")
    contents = {"ca.pem": new.ca, "server.pem": new.certificate, "server.key": new.key}
    for name, content in contents.items():
        (home / "tls" / name).write_bytes(content)
    with socket.create_server(("127.0.0.1", 0)) as running:
        port = running.getsockname()[1]

        def shows() -> None:
            for _ in range(2):
                with suppress(OSError):
                    before.wrap_socket(running.accept()[0], server_side=True)

        thread = threading.Thread(target=shows)
        thread.start()
        path = home / "server.toml"
        path.write_text(path.read_text("utf-8").replace("port = 9440", f"port = {port}"), "utf-8")
        said = federation_status(read_server(home), False)["server"]["message"]
        connected = flower.connect(f"127.0.0.1:{port}", new.ca, {}, read_secret(home))
        with pytest.raises(UserError, match="does not hold") as error, connected:
            pass
        thread.join(60)
    for sentence in (said, str(error.value)):
        assert "restart fedstrata serve, which reads them when it starts" in sentence


def test_the_status_on_the_screen_and_as_json(home: Path) -> None:
    teller(home, EVENTS)
    found = json.loads(CliRunner().invoke(app, ["federation", "status", str(home), "--json"]).stdout)
    assert found["server"]["message"] == "fedstrata serve was never started in this folder"
    assert found["sites"]["a"] == {"admitted": True, "connected": None, "since": None}
    assert found["run"]["sites"]["c"]["missing"] == "is not connected"
    with FileLock(home / RUN_LOCK):
        lines = CliRunner().invoke(app, ["federation", "status", str(home)]).stdout.splitlines()
    assert lines[1].startswith("run          fedavg, round 2 of 3, begun ")
    assert lines[2].startswith("waiting for  b until ")
    assert lines[-3:] == [
        "a     not known  round 2: loss 0.5000, 2.0 s",
        "b     not known  is waited for",
        "c     not known  round 2: is not connected",
    ]


def status(**run: Any) -> dict[str, Any]:
    """A status whose texts would harm a page."""
    bad = "<script>alert(1)</script>"
    record = {
        **dict.fromkeys(("output", "stage", "method", "message"), bad),
        "rounds": 3,
        "round": 0,
        "scored": -1,
        "began": 0.0,
        "until": 1.0,
        "ends": 1.0,
        "status": "running",
        "waiting": [bad],
        "epsilon": None,
        "score": {bad: 1.0},
        "sites": {bad: {"round": -1, "loss": None, "seconds": 1.0, "missing": bad}},
    }
    return {
        "server": {"address": bad, "running": True, "message": bad},
        "sites": {bad: {"admitted": False, "connected": True, "since": 0.0}},
        "nameless": 2,
        "run": {**record, **run},
    }


@pytest.fixture
def page() -> Iterator[PageServer]:
    with PageServer(0, b"secret", lambda refreshed: live.live_page(status(), refreshed)) as server:
        yield server


def test_the_page_shows_texts_as_texts_and_runs_nothing(page: PageServer) -> None:
    answer = httpx.get(page.url)
    assert answer.status_code == 200
    assert "script" not in answer.text.replace("&lt;script&gt;alert(1)&lt;/script&gt;", "")
    assert answer.text.count("&lt;script&gt;") >= 9
    style = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Refresh"] == "5"
    assert "Refresh" not in httpx.get(f"{page.url}still").headers
    assert "Access-Control-Allow-Origin" not in answer.headers
    head = httpx.head(page.url)
    assert (head.status_code, head.content, head.headers["Content-Length"]) == (
        200,
        b"",
        answer.headers["Content-Length"],
    )


def answered(connection: socket.socket, sent: str) -> bytes:
    """The beginning of the answer; nothing where the connection is closed."""
    with suppress(ConnectionError):
        connection.sendall(sent.encode())
        return connection.recv(100)
    return b""


def test_the_page_answers_nobody_else(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT"):
        answer = httpx.request(method, page.url)
        assert (answer.status_code, answer.text) == (405, "GET and HEAD alone."), method
    for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1:80@evil.example", "localhost:80:80", ""):
        answer = httpx.get(page.url, headers={"Host": host})
        assert answer.status_code == 403, host
        assert "Federation" not in answer.text
    assert httpx.get(page.url, headers={"Host": "LOCALHOST:8000"}).status_code == 200, "through a tunnel"
    port = page.server_address[1]
    for path in (
        "/",
        f"/{page.token[:-1]}/",
        f"/{page.token}/../x",
        f"/{page.token}x/",
        "/%2e",
    ):
        answer = httpx.get(f"http://127.0.0.1:{port}{path}")
        assert answer.status_code == 404, path
        assert page.token not in answer.text
    assert page.server_address[0] == "127.0.0.1"
    monkeypatch.setattr(page_server, "SECONDS", 0.2)
    path = page.url.partition(str(port))[2]
    many = "".join(f"x{i}: {'y' * 90}\r\n" for i in range(100))
    for sent in (
        f"GET {path}",
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{many}\r\n",
        f"GET {path}\r\n\r\n",
        "\0" * 9000,
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            assert answered(connection, sent) == b"", "too long, too slow or too old"


def test_the_page_of_many_visitors(page: PageServer) -> None:
    """Who holds connections open keeps others out for some seconds, and takes no more than eight threads."""
    path = page.url.partition(str(page.server_address[1]))[2]
    held = [socket.create_connection(page.server_address[:2], timeout=10) for _ in range(page_server.MOST_AT_ONCE)]
    with socket.create_connection(page.server_address[:2], timeout=10) as one_more:
        assert answered(one_more, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    for connection in held:
        sent = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert answered(connection, sent).startswith(b"HTTP/1.0 200")
        connection.close()


def test_a_taken_port_is_named(page: PageServer) -> None:
    with pytest.raises(UserError, match=r"page_port: cannot listen on 127\.0\.0\.1:\d+"):
        PageServer(page.server_address[1], b"", page.page)


def test_what_is_asked_often_is_found_out_once() -> None:
    asked: list[int] = []
    fresh = Fresh(lambda: {"asked": asked.append(1)})
    fresh(), fresh()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": -1, "stage": ""}, "fedavg, before round 1 of 3, begun "),
        ({"status": "finished", "round": 3, "stage": "warm"}, "stage warm, fedavg, finished, begun "),
        ({"status": "failed", "stage": ""}, "fedavg, failed in round 1 of 3, begun "),
        ({"status": "failed", "round": -1, "stage": ""}, "fedavg, failed before round 1 of 3, begun "),
        ({"status": "stopped", "stage": ""}, "fedavg, stopped in round 1 of 3; --resume goes on, begun "),
    ],
)
def test_where_a_run_stands(changes: dict[str, Any], words: str) -> None:
    assert live.facts(status(method="fedavg", **changes))["run"].startswith(words)


@pytest.mark.parametrize("began", ["NaN", "Infinity", "-Infinity", "1e300", "1e18", "-1e18"])
def test_a_record_with_a_number_that_is_no_time_is_shown(home: Path, began: str) -> None:
    words = f'{{"output": "o", "stage": "", "method": "fedavg", "rounds": 2, "began": {began}, "ends": {began}}}'
    (home / "run.json").write_text(words)
    with FileLock(home / RUN_LOCK):
        ended = CliRunner().invoke(app, ["federation", "status", str(home)])
    assert ended.exit_code == 0, ended.output
    assert "begun ?" in ended.output


def test_the_json_of_a_number_that_is_none_has_null(home: Path) -> None:
    words = (
        '{"output": "o", "stage": "", "method": "fedavg", "rounds": 2, "began": NaN, "score": {"loss": Infinity}}'
    )
    (home / "run.json").write_text(words)
    said = CliRunner().invoke(app, ["federation", "status", str(home), "--json"]).stdout
    found = json.loads(said, parse_constant=pytest.fail)["run"]
    assert (found["began"], found["score"], found["rounds"]) == (None, {"loss": None}, 2)


def test_a_folder_in_the_records_place_is_named(home: Path) -> None:
    (home / "run.json").mkdir()
    ended = CliRunner().invoke(app, ["federation", "status", str(home)])
    assert ended.exit_code == 2
    assert "run.json: cannot be read (Is a directory); expected the record of a run" in ended.output
