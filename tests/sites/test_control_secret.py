"""Signed calls of Flower's control API, and the gate that asks for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fedstrata import UserError
from fedstrata.sites import control_secret
from fedstrata.sites.control_secret import (
    HEADER,
    SHORTEST,
    VALID_SECONDS,
    Signatures,
    read_secret,
    secret_file,
    sign,
)
from fedstrata.sites.flower_processes import MOST_BODY, ControlGate

SECRET, PATH = b"5" * 64 + b"\n", "/v1/control/register-node"


class Client:
    """Calls a gate in pieces and keeps what came through and what was answered."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.gate, self.through, self.sent = ControlGate(self.app, secret), [], []  # type: ignore[var-annotated]

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.through.append((await receive())["body"])

    def call(self, header: str, pieces: list[bytes], path: str = PATH, client: str = "127.0.0.1") -> bool:
        """Whether the call came through."""
        left = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        left.append({"type": "http.request"})

        async def receive() -> Any:
            return left.pop(0) if left else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        before = len(self.through)
        headers = [(HEADER.encode(), header.encode("utf-8", "surrogateescape"))] if header else []
        scope = {
            "type": "http",
            "path": path,
            "client": (client, 1),
            "server": ("127.0.0.1", 1),
            "headers": headers,
        }
        asyncio.run(self.gate(scope, receive, send))
        return len(self.through) > before


def test_a_signed_call_comes_through_whole_and_once() -> None:
    client, header = Client(), sign(SECRET, PATH, b"one two")
    assert client.call(header, [b"one", b" two"])
    assert client.through == [b"one two"]
    assert not client.call(header, [b"one two"]), "it was recorded and sent again"
    assert client.call(sign(SECRET.strip(), PATH, b""), [])


@pytest.mark.parametrize(
    ("header", "body", "path"),
    [
        ("", b"", PATH),
        ("x", b"", PATH),
        ("..", b"", PATH),
        ("1.\udcff.\udcff", b"", PATH),
        ("9" * 10_000, b"", PATH),
        (sign(b"6" * 64, PATH, b""), b"", PATH),
        (sign(SECRET, PATH, b"a"), b"b", PATH),
        (sign(SECRET, PATH, b""), b"", "/v1/control/start-run"),
        (sign(SECRET, PATH, b"a" * (MOST_BODY + 1)), b"a" * (MOST_BODY + 1), PATH),
    ],
)
def test_a_call_that_is_not_signed_does_not_come_through(header: str, body: bytes, path: str) -> None:
    client = Client()
    assert not client.call(header, [body], path)
    assert client.sent[0]["status"] == 403


def test_other_machines_do_not_come_through_with_a_signature() -> None:
    assert not Client().call(sign(SECRET, PATH, b""), [], client="203.0.113.7")


def test_a_signature_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = control_secret.time.time()
    headers = {}
    for late in (-VALID_SECONDS - 2, -VALID_SECONDS / 2, VALID_SECONDS / 2, VALID_SECONDS + 2):
        monkeypatch.setattr(control_secret.time, "time", lambda late=late: now + late)
        headers[late] = sign(SECRET, PATH, b"")
    monkeypatch.setattr(control_secret.time, "time", lambda: now)
    signatures = Signatures(SECRET)
    accepted = [signatures.accept(header, PATH, b"") for header in headers.values()]
    assert accepted == [False, True, True, False]
    monkeypatch.setattr(control_secret.time, "time", lambda: now + VALID_SECONDS)
    assert not any(signatures.accept(header, PATH, b"") for header in list(headers.values())[:3])
    monkeypatch.setattr(control_secret.time, "time", lambda: now + 9 * VALID_SECONDS)
    assert signatures.accept(sign(SECRET, PATH, b""), PATH, b"")
    assert len(signatures.used) == 1, "what has ended is forgotten"


def test_the_secret_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    secret_file(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UserError, match="as the user that runs fedstrata serve"):
        read_secret(tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_secret_that_others_can_read_is_none(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(UserError, match=rf"^{path}: is open to others than its owner \(mode {mode:o}\).* move it"):
        read_secret(tmp_path)
    path.unlink()
    assert secret_file(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"\n" * 64, b"x", b"5" * (SHORTEST - 1)])
def test_a_secret_that_is_empty_or_cut_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    for read in (secret_file, read_secret):
        with pytest.raises(
            UserError, match=f"^{tmp_path / 'secret'}: holds .* of a secret, and 32 .* move it away"
        ):
            read(tmp_path)
    assert (tmp_path / "secret").read_bytes() == content
    (tmp_path / "secret").write_bytes(b"5" * SHORTEST)
    (tmp_path / "secret").chmod(0o600)
    assert read_secret(tmp_path) == b"5" * SHORTEST


def test_a_folder_in_the_secrets_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    with pytest.raises(UserError, match=f"^{tmp_path / 'secret'}: is no file.* move it away"):
        read_secret(tmp_path)


def test_a_machine_that_stops_while_the_secret_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(handle: int) -> None:
        assert not (tmp_path / "secret").exists(), "it has its name before it is on the disk"
        raise KeyboardInterrupt

    monkeypatch.setattr(control_secret.os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        secret_file(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert len(read_secret(tmp_path)) == 64
