"""Calls of Flower's control API, signed with the secret that only the user of ``fedstrata serve`` can read.

Flower 1.41 lets whoever reaches the control API register and remove sites, and start and stop runs. The gate in
front of it asks for a signature: HMAC-SHA256 over the path, the time, a number used once and the body. The secret
itself is never sent, so a program that another user starts on the server's port does not learn it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from fedstrata.errors import UserError

HEADER = "x-fedstrata-signature"
"""Header of a call: seconds since 1970, a number used once, the signature; with dots between."""
VALID_SECONDS = 30.0
"""Age of a signature, and its distance into the future, beyond which it does not count."""
LONGEST = 200
"""Characters of the header."""
SHORTEST = 32
"""Bytes of a secret; those that are made here have 64."""
MEND = "move it away and start fedstrata serve, or join at a site, again, which makes a new one"
"""What to do about a secret that cannot be used."""


def secret_file(folder: Path) -> Path:
    """The file ``secret`` in a folder, readable by its owner alone; written if it does not exist.

    Raises:
        UserError: it is another user's, open to others, is no file, or holds no secret.
    """
    path = folder / "secret"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        length, mode = len(path.read_bytes().strip()), path.stat().st_mode & 0o777
    except PermissionError:
        raise UserError(
            f"{path}: cannot be read or written; start what needs it as the user that runs fedstrata serve or "
            "join in this folder"
        ) from None
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise UserError(f"{path}: is no file, or is in none; {MEND}") from None
    if length < SHORTEST:
        raise UserError(f"{path}: holds {length} bytes of a secret, and {SHORTEST} are the least; {MEND}")
    if os.name == "posix" and mode & 0o077:
        raise UserError(
            f"{path}: is open to others than its owner (mode {mode:o}); if none of them has read it, chmod 600 "
            f"it, else {MEND}"
        )
    return path


def read_secret(folder: Path) -> bytes:
    """The secret in a folder; written if there is none.

    Raises:
        UserError: see :func:`secret_file`.
    """
    return secret_file(folder).read_bytes()


def _make(path: Path) -> None:
    """Write a new secret whole: a machine that stops meanwhile leaves none, and not half of one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sign(secret: bytes, path: str, body: bytes) -> str:
    """The header's value for a call that is sent now."""
    words = f"{int(time.time())}.{secrets.token_hex(16)}"
    return f"{words}.{_signature(secret, path, words, body)}"


class Signatures:
    """Checks signatures; each counts once.

    Args:
        secret: with which calls are signed.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.used: dict[str, int] = {}

    def accept(self, header: str, path: str, body: bytes) -> bool:
        """Whether a call is signed with the secret, now, and for the first time."""
        words, _, signature = header[:LONGEST].rpartition(".")
        expected = _signature(self.secret, path, words, body)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            return False
        now, then = time.time(), int(words.partition(".")[0])  # signed, so it is a time
        self.used = {known: at for known, at in self.used.items() if abs(now - at) <= VALID_SECONDS}
        if abs(now - then) > VALID_SECONDS or words in self.used:
            return False
        self.used[words] = then
        return True


def _signature(secret: bytes, path: str, words: str, body: bytes) -> str:
    key = hashlib.sha256(b"fedstrata control API\n" + secret.strip()).digest()
    signed = "\n".join((path, words, hashlib.sha256(body).hexdigest()))
    return hmac.new(key, signed.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
