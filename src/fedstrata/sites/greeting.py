"""Whether a site takes part in a run: its job is tried and approved before anything of it stays here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from fedstrata.sites.approval import Ask, approve
from fedstrata.sites.messages import HelloHeader, decode_message
from fedstrata.sites.permission import Refused
from fedstrata.sites.proposal import Proposal
from fedstrata.sites.settings import SiteSettings
from fedstrata.wire.files import clear, write_bytes

LOG = logging.getLogger("fedstrata.site")
HELLO, DIGEST = "hello", "digest"
"""In a run's folder: its first message, and the digest of its job."""
START_FILES = ("*.json", "*.txt")
"""Patterns of the files of the start model beside its weights."""
Trial = Callable[[SiteSettings, HelloHeader, Path], Proposal]
"""Tries a run before anything is agreed; see :func:`fedstrata.sites.trial.try_run`."""


def check_same(folder: Path, hello: HelloHeader, digest: str) -> None:
    """Refuse another job in the place of a known one where noise or sums rest on its being the same.

    The difference of two answers to the same rows would hold one noise, or one set of clients, less than was
    accounted for.

    Raises:
        Refused: so it is.
    """
    known, path = [hello], folder / HELLO
    if digest_of(folder) in ("", digest):
        return
    if path.exists():
        before = decode_message(path.read_bytes(), "hello").header
        assert isinstance(before, HelloHeader)
        known.append(before)
    if any(_is_private(own) for own in known):
        raise Refused("this run has begun with another job, and with noise or masked sums a run has one alone")


def agree(
    settings: SiteSettings,
    hello: HelloHeader,
    digest: str,
    folder: Path,
    files: Mapping[str, bytes],
    trial: Trial | None,
    ask: Ask | None,
) -> None:
    """Try the run in a folder beside its own, unless it was tried before, and ask for leave.

    Of a job without leave nothing stays, and nothing of it comes into the place of one that has it.

    Raises:
        Refused: the trial failed, or the owner has not approved the job.
        UserError: the site's own rows or device cannot be used.
    """
    proposal: list[str] = []
    beside = folder.with_name(f"{folder.name}.new")
    try:
        if trial and digest_of(folder) != digest:
            write_start(beside, files)
            proposal = trial(settings, hello, beside).lines()
            for line in proposal:
                LOG.info("proposed: %s", line)
        approve(settings.approve, digest, folder, ask, proposal)
    except BaseException:
        clear(folder, ())
        raise
    finally:
        clear(beside, START_FILES)


def write_start(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put the files of the start model beside its weights, in place of those that were there."""
    clear(folder / "start", START_FILES)
    for file, content in files.items():
        write_bytes(folder / "start" / file, content)


def digest_of(folder: Path) -> str:
    """Digest of the job that a run's folder is of; empty where there is none."""
    path = folder / DIGEST
    return path.read_text("ascii", errors="replace") if path.exists() else ""


def _is_private(hello: HelloHeader) -> bool:
    """Whether a job has noise or masked sums."""
    table = hello.job.get("privacy") or {}
    return bool(table.get("sum_only")) or table.get("level", "none") != "none"
