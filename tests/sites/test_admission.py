"""Keys that end, and keys that are removed, without a restart."""

from __future__ import annotations

import threading
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from fedstrata import UserError
from fedstrata.sites import admission
from fedstrata.sites.admission import REVOKED, Admission, keys_now, watch
from fedstrata.sites.message_server import MessageServer
from fedstrata.sites.provision import add_site, init
from fedstrata.sites.settings import read_server
from fedstrata.sites.transport import SiteTransport
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import pack


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.0)
    init(tmp_path / "federation", ["a", "b"])
    return tmp_path / "federation"


def change(home: Path, old: str, new: str) -> None:
    path = home / "server.toml"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def ends(day: str) -> str:
    return f'b = {{key = "keys/b.pub", until = {day}}}'


def test_a_key_ends_after_its_last_day(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(home, 'b = "keys/b.pub"', ends("2031-05-06"))
    settings = read_server(home)
    assert settings.sites == {name: home / "keys" / f"{name}.pub" for name in ("a", "b")}
    assert settings.ends == {"b": date(2031, 5, 6)}
    for day, names in ((5, ["a", "b"]), (6, ["a", "b"]), (7, ["a"])):

        class Clock:
            @staticmethod
            def now(zone: Any, day: int = day) -> Any:
                from datetime import datetime

                return datetime(2031, 5, day, 23, 59, tzinfo=zone)

        monkeypatch.setattr(admission, "datetime", Clock)
        assert list(keys_now(settings)) == names


def test_keys_that_cannot_be_read_now_are_those_of_before(home: Path) -> None:
    """As where strangers have opened all the files that the process may have."""
    admission = Admission(read_server(home), home)
    keys = admission.keys()
    (home / "keys" / "a.pub").rename(home / "keys" / "aside")
    assert admission.keys() == keys
    assert admission.revoked() == set()
    change(home, 'b = "keys/b.pub"', "")
    (home / "keys" / "aside").rename(home / "keys" / "a.pub")
    assert admission.keys() == {"a": keys["a"]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("b = {until = 2031-05-06}", r"\[sites\] b: lacks key; expected {key = PATH, until = YEAR-MONTH-DAY}"),
        ('b = {key = "keys/b.pub", til = 2031-05-06}', r"\[sites\] b: has 'til'"),
        (ends('"soon"'), r"\[sites\] b: until: 'soon' is no day"),
        (ends("2031-05-06T00:00:00"), r"\[sites\] b: until: .* is no day"),
        ('b = {key = "keys/c.pub"}', r"b: .*keys/c.pub cannot be read"),
    ],
)
def test_what_a_key_may_be(home: Path, line: str, complaint: str) -> None:
    change(home, 'b = "keys/b.pub"', line)
    with pytest.raises(UserError, match=complaint):
        read_server(home)


def test_a_line_that_is_removed_counts_at_once_and_an_error_does_not(home: Path) -> None:
    said: list[str] = []
    looks = Admission(read_server(home), home / "server.toml", said.append)
    assert looks.revoked() == set()
    change(home, "port = 9440", "port = 9440 9440")
    assert set(looks.keys()) == {"a", "b"}
    looks.keys()
    assert len(said) == 1
    assert "the sites stay as they were" in said[0]
    change(home, "port = 9440 9440", "port = 9440")
    change(home, 'b = "keys/b.pub"\n', "")
    assert looks.revoked() == {"b"}
    (home / "keys" / "a.pub").write_bytes((home / "keys" / "b.pub").read_bytes())
    assert looks.revoked() == {"a", "b"}, "a's key is another one now"


def test_serve_applies_what_changes(home: Path) -> None:
    applied: list[list[str]] = []
    said: list[str] = []
    stop = threading.Event()

    def apply(keys: dict[str, Path]) -> None:
        applied.append(list(keys))
        if len(applied) == 1:
            raise OSError("the first time it fails")
        stop.set()

    looks = Admission(read_server(home), home / "server.toml", said.append)
    looks.keys()
    thread = threading.Thread(target=watch, args=(looks, apply, stop, said.append))
    before = threading.Event()
    known = looks.keys

    def keys() -> dict[str, bytes]:
        found = known()
        before.set()
        return found

    looks.keys = keys  # type: ignore[method-assign]
    thread.start()
    assert before.wait(60)
    add_site(home, "c")
    thread.join(60)
    assert applied == [["a", "b", "c"]] * 2
    assert "c: is admitted with its key" in said


class Caller:
    def online(self) -> dict[str, Any]:
        return {"a": (1, ""), "b": (2, "")}

    def send(self, *_: Any) -> str:
        return "1"

    def receive(self, ids: Any) -> Any:
        return iter(())


def test_a_run_does_not_wait_for_a_site_that_is_not_admitted_any_more() -> None:
    gone: set[str] = set()
    tokens = {"a": "x", "b": "y"}
    with MessageServer("127.0.0.1:0", None, tokens) as server:
        transport = SiteTransport(Caller(), server, tokens, lambda: gone)
        online = transport.online()
        first = transport.send(online["b"], pack({}, {}), 60.0, 0)
        assert list(transport.receive([first])) == []
        gone.add("b")
        online = transport.online()
        [(id, answer)] = transport.receive([first])
        assert (id, str(answer)) == (first, REVOKED)
        assert isinstance(answer, WireError)
        assert set(server.tokens) == {"a"}
        again = transport.send(online["b"], pack({}, {}), 60.0, 0)
        assert [str(answer) for _, answer in transport.receive([again])] == [REVOKED]
        kept = transport.send(online["a"], pack({}, {}), 60.0, 0)
        assert list(transport.receive([kept])) == []
