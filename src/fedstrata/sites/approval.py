"""Whether a site takes part in a job: it is asked on its terminal, it has listed the job's digest, or always."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedstrata.sites.limit_tables import Approve
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.permission import Refused
from fedstrata.wire.files import write_bytes

FILE = "approved"
"""In a run's folder: the digest of the job to which the site's owner has said yes."""
Ask = Callable[[Sequence[str]], bool]
"""Shows lines to the site's owner and returns whether the answer is yes."""


def job_digest(hello: HelloHeader, files: Mapping[str, Any]) -> str:
    """What names a job to those who approve it: ``sha256:`` and 64 hexadecimal digits.

    It covers all that the site is told of the job, the model's config and tokenizer among it. The weights are not
    in it: they change with every round, and the server is free in them.

    Args:
        hello: the first message.
        files: name -> content, as bytes or in a tensor, of the model's files that come with it.
    """
    told = hello.model_dump(exclude={"stream", "start"})
    digests = {name: hashlib.sha256(content_of(file)).hexdigest() for name, file in files.items()}
    text = json.dumps({"job": told, "files": digests}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def has_leave(settings: Approve, digest: str, folder: Path, ask: Ask | None) -> bool:
    """Whether a job has leave; if not, the site's owner can be asked.

    Args:
        settings: the site's ``[approve]``.
        digest: the job's.
        folder: the run's.
        ask: asks the owner; None where there is no terminal.

    Raises:
        Refused: it has none, and nobody can be asked.
    """
    if settings.runs == "any" or digest in settings.jobs:
        return True
    if settings.runs == "listed":
        raise Refused(f"the job {digest} is none of those that it has listed ([approve] jobs)")
    if _approved(folder) == digest:
        return True
    if ask is None:
        raise Refused(
            f"its owner is asked about every job ([approve] runs = 'ask'), and is not there for {digest}"
        )
    return False


def approve(settings: Approve, digest: str, folder: Path, ask: Ask | None, proposal: Sequence[str]) -> None:
    """Refuse a job that the site's owner has not approved; arguments as :func:`has_leave`.

    Args:
        proposal: what the job would do, a line each.

    Raises:
        Refused: no yes.
    """
    if has_leave(settings, digest, folder, ask):
        return
    assert ask is not None
    if not ask([*proposal, f"job {digest}"]):
        raise Refused("its owner has said no to this job")
    write_bytes(folder / FILE, digest.encode())


def _approved(folder: Path) -> str:
    path = folder / FILE
    return path.read_text("ascii", errors="replace") if path.exists() else ""


def content_of(file: torch.Tensor | bytes) -> bytes:
    """The content of a file that may have come as a tensor of bytes."""
    if isinstance(file, bytes):
        return file
    return file.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
