"""The release log of a site: one line for every message that left it, chained by hashes, and written first.

``state/releases.jsonl`` is only added to, never rotated, and holds no text of the site's. A line is a JSON object:
the fields of :class:`Release`, and ``chain``, the SHA-256 of the chain before it and of the line itself without
``chain``. So a line that is changed, removed or put in between breaks the chain from there on. What a chain cannot
show is that its last lines are missing; ``state/releases.head`` holds how many there were and the last chain.
Whoever can write both files can shorten them together: only a copy of the last chain elsewhere tells.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.errors import UserError
from fedstrata.wire.files import append_bytes, flush, read_sealed, write_sealed

LOG, HEAD = "releases.jsonl", "releases.head"
START = "0" * 64
"""The chain before the first line."""
DAY = timedelta(days=1)
WITH_ROWS = ("weights", "scores", "hidden_states", "activations")
"""Payloads that are made of the site's rows; the others are numbers of examples, receipts and refusals."""


@dataclass(frozen=True)
class Release:
    """A message that left.

    Attributes:
        time: UTC, as in ``2026-03-01T09:00:00.000001+00:00``.
        run: the run's name, 32 hexadecimal digits; empty where the message named none.
        round: 0-based round; -1 before the first.
        payload: ``weights``, ``hidden_states``, ``activations``, ``scores``, ``sum`` (keys, shares and
            signatures of masked sums), ``receipt`` (a reply without anything), ``examples`` (how many the site
            has), ``over`` (the same, once the server has said that a run in which the site has worked is over)
            or ``refusal``.
        parts: names of the parts of the model in it.
        bytes: of the message as it travels.
        rows: distinct rows of the site's that went into it.
        sha256: of these bytes.
        epsilon: privacy loss of this message by itself, where the run adds noise; None where it adds none, and
            where the same bytes had left before.
        examples: SHA-256 of all by which rows became examples, where the message tells what came of that.
    """

    time: str
    run: str
    round: int
    payload: str
    parts: tuple[str, ...]
    bytes: int
    rows: int
    sha256: str
    epsilon: float | None = None
    examples: str | None = None


class ReleaseLog:
    """The log in a site's folder; one process writes it.

    Args:
        folder: the site's ``state``.

    Attributes:
        count: lines.
        chain: the last chain.
        run_bytes: run -> bytes that left in it.
        answered: (run, round, payload) of what left that was made of rows.
        told: run that was told what came of making examples of the rows, as how many there are -> by what they
            were made; empty where an earlier version wrote the line.
        over: runs that are over; what limits them, as their job and their answers, is not kept any more.
        short: SHA-256 of the messages that left and were not made of rows.
        noisy: (run, round) of what left with noise.

    Raises:
        UserError: a line, or the end, is not as it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.head = folder / LOG, folder / HEAD
        self.count, self.chain = 0, START
        self.run_bytes: defaultdict[str, int] = defaultdict(int)
        self.answered: set[tuple[str, int, str]] = set()
        self.told: dict[str, str] = {}
        self.over: set[str] = set()
        self.short: set[str] = set()
        self.noisy: set[tuple[str, int]] = set()
        self._times, self._sizes, self._refusals = array("d"), array("q"), array("d")
        folder.mkdir(parents=True, exist_ok=True)
        for release, chain in read_log(folder):
            self._take(release, chain)
        _drop_torn_line(self.path)
        self._write_head()

    def append(self, release: Release, head: bool = True) -> None:
        """Write a line; it is on the disk when this returns, and only then may the message leave.

        Args:
            release: what leaves.
            head: also write how far the log goes; of the batches of a stream only the last one needs it.
        """
        fields = _fields(release)
        chain = _chained(self.chain, fields)
        line = json.dumps({**fields, "chain": chain}).encode() + b"\n"
        new = not self.path.exists()
        self.path.touch(0o600)
        append_bytes(self.path, line)
        flush(self.path)
        if new:
            _flush_folder(self.path.parent)
        self._take(release, chain)
        if head:
            self._write_head()

    def bytes_today(self, now: datetime) -> int:
        """Bytes that left in the 24 hours before ``now``, or after it by a clock that was ahead."""
        return int(np.asarray(self._sizes)[_recent(self._times, now)].sum())

    def refusals_today(self, now: datetime) -> int:
        """Refusals that left in that time."""
        return int(_recent(self._refusals, now).sum())

    def runs(self) -> set[str]:
        """The runs in which something left that was made of rows."""
        return {run for run, _, _ in self.answered}

    def _take(self, release: Release, chain: str) -> None:
        self.count, self.chain = self.count + 1, chain
        self.run_bytes[release.run] += release.bytes
        if release.payload in WITH_ROWS:
            self.answered.add((release.run, release.round, release.payload))
        else:
            self.short.add(release.sha256)
            if release.examples or (release.payload == "examples" and release.rows):
                self.told.setdefault(release.run, release.examples or "")
        if release.payload == "over":
            self.over.add(release.run)
        if release.epsilon is not None:
            self.noisy.add((release.run, release.round))
        time = datetime.fromisoformat(release.time).timestamp()
        self._times.append(time)
        self._sizes.append(release.bytes)
        if release.payload == "refusal":
            self._refusals.append(time)

    def _write_head(self) -> None:
        write_sealed(self.head, {"lines": self.count, "chain": self.chain})


def release_of(
    pieces: Iterator[bytes | memoryview], run: str, round: int, payload: str, parts: tuple[str, ...], rows: int
) -> Release:
    """The release of a message that is about to leave, from its bytes in pieces."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return Release(now().isoformat(), run, round, payload, parts, size, rows, digest.hexdigest())


def now() -> datetime:
    """The time of a release."""
    return datetime.now(UTC)


def _recent(times: array[float], now: datetime) -> np.ndarray:
    """Which of all times are in the 24 hours before ``now``, or after it: clocks are put back, too."""
    return np.asarray(times) > (now - DAY).timestamp()


def read_log(folder: Path) -> Iterator[tuple[Release, str]]:
    """Every release of the log in a site's folder with its chain, each line checked.

    Raises:
        UserError: a line, or the end, is not as it was written; it says which and what to do.
    """
    path = folder / LOG
    for place in (path, folder / HEAD):
        if place.is_dir():
            raise _broken(place, "is a folder, not a file of the release log")
    chain, count, head = START, 0, _read_head(folder)
    ends = {START} if head is None or not head[0] else set[str]()
    with path.open("rb") if path.exists() else open(os.devnull, "rb") as file:
        for count, line in enumerate(file, 1):
            if not line.endswith(b"\n") and head and count > head[0]:
                count -= 1  # it is being written, or was when the machine stopped
                break
            try:
                release, chain = _checked(line, chain)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise _broken(path, f"line {count} is not as it was written") from None
            if head and count == head[0]:
                ends.add(chain)
            yield release, chain
    if head is None and (count or os.path.lexists(folder / HEAD)):
        raise _broken(path, f"{folder / HEAD}, which says how far it goes, is missing or damaged")
    if head and head[1] not in ends:
        raise _broken(path, f"it ends after line {count}, and once had {head[0]} lines")


def _checked(line: bytes, before: str) -> tuple[Release, str]:
    """The release in a line, and its chain; raises ValueError if it does not follow on the chain before it."""
    fields = json.loads(line)
    chain = fields.pop("chain")
    if chain != _chained(before, fields) or not line.endswith(b"\n"):
        raise ValueError
    release = Release(**{**fields, "parts": tuple(fields["parts"])})
    datetime.fromisoformat(release.time)
    return release, chain


def _chained(before: str, fields: Mapping[str, Any]) -> str:
    content = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}\n{content}".encode()).hexdigest()


def _fields(release: Release) -> dict[str, Any]:
    fields = dataclasses.asdict(release) | {"parts": list(release.parts)}
    return {key: value for key, value in fields.items() if value is not None}


def _read_head(folder: Path) -> tuple[int, str] | None:
    table = read_sealed(folder / HEAD)
    return None if table is None else (int(table["lines"]), str(table["chain"]))


def _drop_torn_line(path: Path) -> None:
    """Drop a last line without an end: the machine stopped while it was written, and its message never left."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        tail = b""
        while size and b"\n" not in tail:
            size = max(0, size - 4096)
            file.seek(size)
            tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(size + tail.rfind(b"\n") + 1)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _broken(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: {what}; nothing leaves this site until you have found out why and moved {LOG} and {HEAD} away "
        "(keep them: they are the record of what has left), after which a new log begins"
    )
