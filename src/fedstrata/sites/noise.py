"""A site's own noise: the keys of its streams follow from a secret of the site's and from what it is asked.

The server knows the job's seed, and with it every stream of the job; of these it knows none. The same request gets
the same noise again, after any restart. Another request for the same round is refused: the difference of two
answers with noise of their own would tell more than was accounted for.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstrata.client.private import Draw
from fedstrata.plan.kinds import Index, Weights
from fedstrata.plan.messages import Request
from fedstrata.tasks import Examples
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import PRIVATE, append_lines, flush, read_lines, write_bytes

KEY, ASKED = "noise.key", "noise.jsonl"
DRAWN_BY = "ChaCha20, Box and Muller"
"""How noise follows from its key. Another version, which draws otherwise, refuses what this one has answered."""


class SecretNoise:
    """The noise of one run at one site.

    Args:
        folder: the run's, on the site's own disk.
        rows: a digest of the rows that the site trains on, see :func:`own_rows`.
    """

    def __init__(self, folder: Path, rows: bytes) -> None:
        self.folder, self.rows = folder, rows

    def __call__(self, request: Request, start: Weights) -> Draw:
        """The keys of a request's streams.

        Args:
            request: what is asked.
            start: all tensors that training starts from, by where they come from.

        Raises:
            WireError: the same round has been answered to another request, or from another start or other rows.
        """
        digest = training_digest(request, start, self.rows)
        self._only(request.round, digest)
        key = self._key()

        return lambda use: hmac.new(key, f"{digest}\0{use}".encode(), hashlib.sha256).digest()

    @property
    def name(self) -> str:
        """Names the secret, and tells nothing of it."""
        return hashlib.sha256(b"name" + self._key()).hexdigest()[:16]

    def _only(self, round: int, digest: str) -> None:
        path = self.folder / ASKED
        asked = {line["round"]: line["request"] for line in read_lines(path)}
        if round not in asked:
            add_line(path, {"round": round, "request": digest})
        elif asked[round] != digest:
            raise WireError(f"round {round + 1}: another request was answered with noise; expected the same one")

    def _key(self) -> bytes:
        """The secret, made when it is first needed; readable by the site's owner alone."""
        path = self.folder / KEY
        if not path.exists():
            write_bytes(path, secrets.token_bytes(32), PRIVATE)
        key = path.read_bytes()
        if len(key) != 32:
            raise WireError("its noise cannot be drawn; its own log says why")
        return key


def training_digest(request: Request, start: Weights, rows: bytes) -> str:
    """A digest of all that a message with noise depends on; were anything else in it, two messages with the same
    noise could differ, and their difference would have none.

    Args:
        request: what is asked.
        start: all tensors that training starts from, by where they come from.
        rows: a digest of the rows that are trained on.
    """
    asked = {"round": request.round, "client": request.client, "phase": request.phase, "span": request.span}
    asked["drawn by"] = DRAWN_BY
    digest = hashlib.sha256(json.dumps({**asked, "plan": asdict(request.plan)}, sort_keys=True).encode())
    digest.update(rows)
    for whence, tensors in sorted(start.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(f"\0{whence}|{name}|{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def own_rows(examples: Examples, index: Index) -> bytes:
    """A digest of the examples at ``index``, as they are tokenized, with their labels."""
    tokens, labels = examples.tokens, examples.labels
    arrays: list[npt.NDArray[Any]] = [index, tokens.ids, tokens.offsets, tokens.words, tokens.types]
    digest = hashlib.sha256()
    for array in arrays if labels is None else [*arrays, labels]:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Add a record, which is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        write_bytes(path, content[: content.rfind(b"\n") + 1])
    append_lines(path, [line])
    flush(path)
