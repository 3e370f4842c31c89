"""What a site keeps of a run, and what it began the run with: checked here, and said to nobody else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from fedstrata.data.fingerprint import Fingerprints, difference
from fedstrata.server.journal import Journal
from fedstrata.sites.permission import Refused
from fedstrata.wire.files import (
    append_bytes,
    checksum_of,
    encode_lines,
    flush,
    read_lines,
    read_sealed,
    write_sealed,
)

LOG = logging.getLogger("fedstrata.site")
START = "start/model.safetensors"
"""The start model, in a run's folder."""
ROWS = "rows.json"
"""Fingerprints of the rows that the run began with, beside it."""


def open_journal(folder: Path) -> Journal:
    """The journal of what the site keeps of a run; a line that a kill cut off counts as not written.

    Raises:
        Refused: it is damaged.
    """
    journal, path = Journal(folder), _path(folder)
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        journal.read(json.loads(line) for line in whole.splitlines())
    except (ValueError, KeyError, TypeError):
        raise _damaged(path) from None
    if len(whole) < len(content):
        path.write_bytes(whole)
    return journal


def write_journal(folder: Path, journal: Journal) -> None:
    """Add what has been written since to the file of the journal, on the disk."""
    for file in journal.take_unflushed():
        flush(file)
    if lines := journal.take():
        append_bytes(_path(folder), encode_lines(lines))
        flush(_path(folder))


def holds_start(folder: Path, journal: Journal) -> bool:
    """Whether the start model is here; not one that was still being written when the program ended.

    Nothing had begun from it then. What has begun without a note of its start is damaged, which :func:`check_own`
    says.
    """
    return (folder / START).exists() and (START in journal.files or (folder / ROWS).exists())


def check_own(folder: Path, journal: Journal, rows: Fingerprints) -> None:
    """Refuse to go on with other rows than the run began with, or with files that are damaged.

    Raises:
        Refused: the rows are others, or a file is damaged. What differs stands in the site's own log alone.
    """
    path = folder / ROWS
    new = not path.exists() and journal.files.keys() == {START}
    before = rows if new else read_sealed(path)
    if before is None or START not in journal.files:
        raise _damaged(path if before is None else _path(folder))
    if other := difference(before, rows):
        LOG.error("%s: %s", folder, other)
        raise Refused("its rows are not those that it began this run with; its own log says more")
    if (wrong := journal.damaged() or _damaged_before(folder, journal)) is not None:
        raise _damaged(wrong)


def keep_rows(folder: Path, rows: Fingerprints) -> None:
    """Note the rows that a run begins with; not before the site takes part, or its owner could add none to it."""
    if not (folder / ROWS).exists():
        write_sealed(folder / ROWS, rows)


def _damaged_before(folder: Path, journal: Journal) -> Path | None:
    """An older file that is not as it was written: a round that is asked for again begins with these."""
    newest = {file for file, _ in journal.files.values()}
    noted = {line["file"]: line["checksum"] for line in read_lines(_path(folder)) if "file" in line}
    older = (folder / file for file in noted.keys() - newest if (folder / file).exists())
    return next((path for path in older if checksum_of(path) != noted[path.relative_to(folder).as_posix()]), None)


def _damaged(path: Path) -> Refused:
    LOG.error("%s: is damaged or missing", path)
    return Refused("what it keeps of this run is damaged; its own log says more")


def _path(folder: Path) -> Path:
    return folder / "journal.jsonl"
