"""The commands of a federation, where they are typed wrong."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from deployment import free_port
from fedstrata import UserError
from fedstrata.cli import app
from fedstrata.job.engine_table import Engine
from fedstrata.sites import certificates, connecting, flower_processes, serve
from fedstrata.sites import federation as between
from fedstrata.sites.connecting import Watch, await_connection, clock_complaint
from fedstrata.sites.provision import init
from fedstrata.sites.settings import read_server
from fedstrata.sites.site_log import LOG, log_to


@pytest.fixture
def home(tmp_path: Path) -> Path:
    init(tmp_path / "federation", ["a", "b"], host="fed.example.org")
    return tmp_path / "federation"


def said(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    [line] = done.output.strip().splitlines()
    return line


def test_without_tls_only_on_one_machine(home: Path) -> None:
    for words in (["serve", str(home)], ["join", str(home / "sites" / "a" / "site.toml")]):
        assert "--insecure: is for one machine alone" in said(*words, "--insecure")


def test_what_is_not_there(home: Path) -> None:
    assert "nowhere" in said("serve", str(home / "nowhere"))
    assert "cannot be read" in said("join", str(home / "sites" / "c" / "site.toml"))
    assert "go together" in said("federation", "init", str(home / "new"), "--sites", "a", "--ca", "x")
    assert "holds a federation already" in said("federation", "init", str(home), "--sites", "a")


def test_a_site_says_what_is_wrong_with_its_rows_before_it_joins(home: Path) -> None:
    site = home / "sites" / "a"
    assert f"{site / 'train.csv'}" in said("join", str(site))
    (site / "train.csv").write_text("sentence,label\nA kidney.,kidney\n")
    assert "has no column 'text'; expected one of: sentence, label" in said("join", str(site / "site.toml"))


def test_init_names_every_port(tmp_path: Path) -> None:
    """Of the one for messages it could not: where 9442 was another's, `server.toml` had to be edited."""
    words = ["federation", "init", str(tmp_path / "f"), "--sites", "a", "--port", "9442", "--message-port", "9444"]
    assert CliRunner().invoke(app, words).exit_code == 0
    settings = read_server(tmp_path / "f")
    assert (settings.port, settings.stream_port, settings.message_port) == (9442, 9441, 9444)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        init(tmp_path / "f", ["a"], port=taken.getsockname()[1])
        assert "cannot listen on 127.0.0.1" in said("serve", str(tmp_path / "f"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("ca.pem", "hello", "tls: ca: {} holds no certificate in PEM form"),
        ("server.pem", "hello", "tls: certificate: {} holds no certificate in PEM form"),
        ("clients.pem", "hello", "tls: clients: {} holds no certificate in PEM form"),
        ("server.key", "-----BEGIN EC PRIVATE KEY-----", "tls: key: {} holds no private key in PEM form"),
    ],
)
def test_a_server_tries_its_certificates_before_it_serves_or_runs(
    tmp_path: Path, name: str, content: str, expected: str
) -> None:
    """Flower ends without a reason, or waits for a minute; gRPC calls it a port that is taken."""
    init(home := tmp_path / "federation", ["a"], client_certificates=True)
    (home / "tls" / name).write_text(content)
    assert expected.format(home / "tls" / name) in said("serve", str(home))
    refused = pytest.raises(UserError, match=f"^{re.escape(expected.format(home / 'tls' / name))}")
    with refused, between.federation(Engine(name="flower", federation=str(home))):
        pass


def test_a_server_whose_certificate_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "YEAR", -timedelta(hours=1))
    init(tmp_path / "federation", ["a"])
    assert "certificate has expired" in said("serve", str(tmp_path / "federation"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("ca.pem", "hello", "ca: {} holds no certificate in PEM form"),
        ("a.key", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz", "key: {} holds no whole ECDSA key"),
        ("a.pem", "hello", "certificate: {} holds no certificate in PEM form"),
        ("a.tls.key", "hello", "certificate_key: {} holds no private key in PEM form"),
    ],
)
def test_a_site_tries_its_keys_before_it_joins(tmp_path: Path, name: str, content: str, expected: str) -> None:
    init(home := tmp_path / "federation", ["a"], client_certificates=True)
    (site := home / "sites" / "a").joinpath(name).write_text(content)
    assert expected.format(site / name) in said("join", str(site))


def test_a_site_whose_certificate_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "YEAR", -timedelta(hours=1))
    init(home := tmp_path / "federation", ["a"], client_certificates=True)
    assert "a.pem has expired (on 20" in said("join", str(home / "sites" / "a"))


def test_of_a_certificate_that_ends_soon_is_said_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sites were shut out one day, and nobody had been told."""
    told: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(certificates.time, "monotonic", lambda: clock[0])
    for days in (31, 20):
        monkeypatch.setattr(certificates, "YEAR", timedelta(days=days))
        init(home := tmp_path / str(days), ["a"], client_certificates=True)
        path = home / "sites" / "a" / "a.pem"
        ending = certificates.Ending(path, "then so", told.append)
        for clock[0] in (0.0, 10.0, 86_000.0, 86_500.0):
            ending()
    assert len(told) == 2
    assert set(told) == {f"{path}: expires on {datetime.now(UTC) + timedelta(days=20):%Y-%m-%d}; then so"}
    certificates.Ending(None, "", told.append)()
    trusted = path.read_bytes().replace(b" CERT", b" TRUSTED CERT")  # which OpenSSL reads
    assert certificates.ends_soon(path, trusted, "") == ""


def test_a_server_and_a_site_look_at_when_their_certificates_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "YEAR", timedelta(days=20))
    init(home := tmp_path / "federation", ["a"], port=free_port(), client_certificates=True)
    told: list[str] = []
    monkeypatch.setattr(serve, "_supervise", lambda *arguments: arguments[6]()())  # what looks while it is up
    serve.serve(read_server(home), told.append)
    assert [line.partition(": expires on ")[0] for line in told] == [str(home / "tls" / "server.pem")]
    Watch("a", tmp_path / "supernode.log", print, lambda: told.append("looked"))()
    assert told[1:] == ["looked"]


@pytest.mark.parametrize("days", [-1, 1])
def test_a_site_reads_that_it_is_the_servers_certificate_that_has_no_validity_now(days: int) -> None:
    what = "has expired" if days < 0 else "is not yet valid"
    log = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate {what} (_ssl.c:1006)"
    assert "by this machine's clock the server's certificate" in flower_processes.failure_reason(log)


def test_a_site_with_a_key_that_is_in_use_reads_that_another_may_have_it() -> None:
    """A copy of a site's folder on a second machine read, without an end, that it was there a minute ago."""
    said = flower_processes.failure_reason("PERMISSION_DENIED: Node not activated [code: 2004]")
    assert "another fedstrata join is connected with it" in said
    assert "within the last minute" in said


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = serve.secret_file(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert len(text) == 64
    assert serve.secret_file(tmp_path / "new").read_text() == text


def test_one_run_at_a_time(home: Path) -> None:
    """The second one says so, and the first one's end lets others begin."""
    complaint = pytest.raises(UserError, match="another run is on in this federation")
    with between._run_lock(home), complaint, between._run_lock(home):
        pass
    with between._run_lock(home):
        pass


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (60, "the clock of this machine is 60 s ahead of the server's; at most 5 s ahead or 305 s behind"),
        (-86_400, "the clock of this machine is 24 h 00 min behind the server's"),
        (3, ""),
        (-290, ""),
    ],
)
def test_a_site_says_that_its_clock_is_another(ahead: int, words: str) -> None:
    """Flower's own log says nothing of it."""

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            self.send_header("Date", formatdate(time.time() - ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request, daemon=True).start()
        said = clock_complaint(f"127.0.0.1:{server.server_port}", None)
    assert said.replace("61 s", "60 s").startswith(words)
    assert bool(said) == bool(words)


def test_of_its_clock_a_site_says_once_until_it_was_connected(tmp_path: Path) -> None:
    """With every try, each few seconds, the same line was written to its log."""
    said, log = list[str](), tmp_path / "supernode.log"
    wait = partial(await_connection, "a", log, threading.Event(), said.append, lambda: f"clock {len(said)}", [])
    log.write_text("")
    ended = subprocess.Popen(["true"])
    ended.wait()
    for _ in range(3):
        wait(ended)
    assert said == ["a: clock 0"]
    log.write_text(flower_processes.CONNECTED)
    up = subprocess.Popen(["sleep", "60"])
    wait(up)
    up.kill()
    up.wait()
    wait(ended)
    assert said == ["a: clock 0", "a: connected", "a: clock 2"]


def test_of_a_server_that_is_away_no_clock_is_known() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert clock_complaint(f"127.0.0.1:{closed.getsockname()[1]}", None) == ""


def test_a_log_on_a_full_disk_lacks_lines(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(LOG.handlers)
    try:
        log_to(Path("/dev/full"))
        for _ in range(2):
            LOG.error("failed", exc_info=OSError(errno.ENOSPC, "No space left on device"))
    finally:
        for handler in set(LOG.handlers) - set(before):
            LOG.removeHandler(handler)
            with suppress(OSError):
                handler.close()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said == "/dev/full: No space left on device; it lacks lines from here on\n", "once"


def test_a_message_is_one_line_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "site.log"
    before = list(LOG.handlers)
    try:
        log_to(path)
        forged = "x\n2026-01-01 00:00:00,000 INFO run 0: over\x1b[2J"
        LOG.info("run %s", forged)
        try:
            raise ValueError(forged)
        except ValueError as error:
            LOG.error("failed", exc_info=error)
    finally:
        for handler in set(LOG.handlers) - set(before):
            LOG.removeHandler(handler)
            handler.close()
    lines = path.read_text("utf-8").splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [lines[0], lines[1]]
    assert lines[0].endswith("INFO run x 2026-01-01 00:00:00,000 INFO run 0: over")
    assert "\x1b" not in path.read_text("utf-8")


def test_a_site_says_once_that_its_server_went_away_and_once_that_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told, log = [0.0], list[str](), tmp_path / "supernode.log"
    monkeypatch.setattr(connecting.time, "monotonic", lambda: now[0])
    log.write_text("INFO :      SuperNode ID: 7\n")
    watch = connecting.Watch("a", log, told.append)

    def looks(seconds: float, line: str = "") -> list[str]:
        with log.open("a") as file:
            file.write(line)
        for _ in range(round(5 * seconds)):
            watch()
            now[0] += 0.2
        return told

    lost = "WARNING :   Connection attempt failed, retrying in 3.20 seconds\n"
    back = "INFO :      Connection successful after 12.20 seconds and 4 tries.\n"
    assert looks(20) == []
    assert looks(5, lost) == [], "a call that is repeated a moment later is no news"
    assert looks(20, back) == []
    away = f"a: the server does not answer; {log}"
    assert looks(300, lost) == [away]
    assert looks(300, lost) == [away]
    assert looks(300, back) == [away, "a: the server answers again"]
    assert looks(30, lost) == [away, "a: the server answers again", away]


def test_what_is_said_of_a_lost_connection_is_what_flower_writes() -> None:
    code = """
import httpx
from flwr.supercore.retry import make_simple_http_retry_invoker
calls = []
def call():
    calls.append(1)
    if len(calls) == 1:
        raise httpx.ConnectError("refused")
make_simple_http_retry_invoker().invoke(call)
"""
    flower_processes.prepare_flower()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert 0 <= said.find(flower_processes.LOST) < said.find(flower_processes.BACK)


def test_flowers_server_has_as_many_files_open_as_it_may(tmp_path: Path) -> None:
    """A thousand silent connections took all places of the usual 1,024: no site and no run came in any more."""
    (tmp_path / "secret").write_bytes(b"secret")
    words = ["superlink", flower_processes.SECRET_OPTION, str(tmp_path / "secret")]
    program = f"""
import os, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from flwr.superlink import cli
cli.flower_superlink = lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
from fedstrata.sites import flower_processes
flower_processes._main(str(os.getppid()), *{words!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) > 256


def test_a_process_that_is_up_is_watched_until_it_ends(tmp_path: Path) -> None:
    stop, looks = threading.Event(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            stop.set()

    threading.Timer(10, stop.set).start()  # where nothing looks, the test ends too
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    serve._supervise(command, tmp_path / "x.log", tmp_path, stop, print, lambda process: None, lambda: look)
    assert len(looks) == 3


def test_a_process_whose_log_is_moved_away_goes_on_and_one_without_a_folder_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "RESTART_SECONDS", 0.5)
    stop, looks, said_lines, logs = threading.Event(), [], list[str](), tmp_path / "logs"
    log = logs / "x.log"
    watch = Watch("a", log, said_lines.append)

    def look() -> None:
        watch()
        looks.append(1)
        if len(looks) == 1:
            log.rename(logs / "x.log.1")
        if len(looks) == 3:
            logs.rename(tmp_path / "away")
            raise PermissionError(13, "Permission denied", str(log))
        if len(looks) == 5:
            stop.set()

    def say(line: str) -> None:
        said_lines.append(line)
        if len(said_lines) == 2:
            (tmp_path / "away").rename(logs)

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    timer = threading.Timer(20, stop.set)
    timer.start()
    serve._supervise(command, log, tmp_path, stop, say, lambda process: None, lambda: look)
    timer.cancel()
    again = "; trying again in 0 s"
    assert said_lines == [f"{log}: Permission denied{again}", f"{log}: No such file or directory{again}"]
    assert len(looks) == 5
    assert log.exists()


def test_a_log_takes_no_more_of_the_disk_however_much_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key, a call of a path of 60 KB was a line of 60 KB in the server's log."""
    monkeypatch.setattr(flower_processes, "MOST_LOG", 100_000)
    stop, sizes, log = threading.Event(), list[int](), tmp_path / "x.log"
    writes = "print('x' * 2000, i, flush=True); time.sleep(0.001)"
    command = [sys.executable, "-c", f"import time\nfor i in range(4000): {writes}\ntime.sleep(1)"]

    def look() -> None:
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("*.log")))

    serve._supervise(command, log, tmp_path, stop, lambda why: stop.set(), lambda process: None, lambda: look)
    assert max(sizes) < 4_000_000
    assert sizes[-1] > 100_000
    assert log.read_text().endswith(" 3999\n")


def test_why_a_process_does_not_come_up_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose key had been removed said so every few seconds, as long as its program ran."""
    monkeypatch.setattr(serve, "RESTART_SECONDS", 0.01)
    stop, starts, told = threading.Event(), [], list[str]()

    def up(process: subprocess.Popen[bytes]) -> None:
        starts.append(process)
        if len(starts) == 5:
            stop.set()
        if len(starts) != 3:  # the third one is up, and ends later
            process.wait()

    command = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    serve._supervise(command, tmp_path / "x.log", tmp_path, stop, told.append, up)
    assert told == ["the connection was lost; trying again in 0 s"] * 2


def test_a_program_ends_where_nothing_keeps_its_process(tmp_path: Path) -> None:
    def look() -> None:
        raise RuntimeError

    stop, command = threading.Event(), [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(RuntimeError):
        serve._supervise(command, tmp_path / "x.log", tmp_path, stop, print, lambda process: None, lambda: look)
    assert stop.is_set()


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("federation", "init", LONG, "--sites", "a"),
        ("federation", "add", LONG, "c"),
        ("federation", "status", LONG),
        ("serve", LONG),
        ("join", LONG),
        ("site", "log", LONG),
    ],
)
def test_a_folder_with_a_name_that_is_too_long(words: tuple[str, ...]) -> None:
    assert "(File name too long)" in said(*words)


@pytest.mark.parametrize("folder", ["/proc/nope", LONG])
def test_a_sites_folder_that_cannot_be_made(home: Path, folder: str) -> None:
    site = home / "sites" / "a"
    (site / "train.csv").write_text("text,label\nA kidney.,kidney\n")
    settings = (site / "site.toml").read_text()
    (site / "site.toml").write_text(settings.replace('folder = "state"', f'folder = "{folder}"'))
    assert f'folder = "{folder}"' in (site / "site.toml").read_text()
    assert "folder: " in said("join", str(site))


def test_a_folder_is_for_one_program_at_a_time(tmp_path: Path) -> None:
    with serve._alone(tmp_path), pytest.raises(UserError, match="another fedstrata join"), serve._alone(tmp_path):
        pass
    with serve._alone(tmp_path):
        pass


def test_a_site_is_added_to_the_federation_of_a_server_toml(home: Path) -> None:
    done = CliRunner().invoke(app, ["federation", "add", str(home / "server.toml"), "c"])
    assert done.exit_code == 0, done.output
    assert done.output.split()[-1] == str(home / "sites" / "c" / "site.toml")
    (home / "other.toml").write_text((home / "server.toml").read_text())
    assert "other.toml: is a file; expected the folder" in said("federation", "add", str(home / "other.toml"), "d")


@pytest.mark.parametrize("words", [("serve", "nowhere"), ("join", "nowhere")])
def test_a_signal_before_anything_is_up_stops_with_a_word(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def signaled(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where the command does not answer it, the tests go on
    for read in ("read_server", "read_site"):
        monkeypatch.setattr(f"fedstrata.sites.settings.{read}", signaled)
    try:
        ended = CliRunner().invoke(app, words)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.exit_code == 130, ended.output
    assert "fedstrata: stopped" in ended.output
