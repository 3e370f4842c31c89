"""The release log of a site in words, for its owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedstrata.errors import plural
from fedstrata.sites.release_log import LOG, START, read_log

OUTSIDE = {"over": "after training", "refusal": "-"}
"""Payload -> when it left, where its line has no round; refusals have none, so the same words have one line."""


def log_lines(folder: Path) -> Iterator[str]:
    """A line for every message, then the sum.

    Raises:
        UserError: the log is damaged; what stands before the damage is shown.
    """
    count = size = 0
    for release, _ in read_log(folder):
        count, size = count + 1, size + release.bytes
        parts = f"  {' '.join(release.parts)}" if release.parts else ""
        outside = OUTSIDE.get(release.payload, "before training")
        round = f"round {release.round + 1}" if release.round >= 0 else outside
        loss = "" if release.epsilon is None else f"  epsilon {release.epsilon:g}"
        size_and_rows = f"{release.bytes} bytes  {plural(release.rows, 'row')}"
        where = f"{release.time[:19]}Z  {release.run[:8] or '-':8}  {round}  {release.payload}"
        yield f"{where}  {size_and_rows}{loss}  {release.sha256}{parts}"
    yield f"{plural(count, 'message')}, {size:,} bytes in all"


def verified_lines(folder: Path) -> Iterator[str]:
    """What a check of the whole log finds.

    Raises:
        UserError: the log is damaged.
    """
    count, last = 0, START
    for _, chain in read_log(folder):
        count, last = count + 1, chain
    yield f"{folder / LOG}: {plural(count, 'message')}, each as it was written; last chain {last}"
