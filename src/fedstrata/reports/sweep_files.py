"""The files of a sweep's table: ``table.json``, ``.csv``, ``.md`` and ``.tex``, and ``cells.csv``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedstrata.errors import UserError
from fedstrata.plan.kinds import FORMAT, PAGE
from fedstrata.reports.runs import check_format
from fedstrata.reports.sweep import SweepCell, SweepRow, sweep_rows
from fedstrata.reports.sweep_text import cells_csv, latex, markdown, rows_csv
from fedstrata.wire.files import endless_file, write_bytes

TABLE = "table.json"
"""What makes a folder that of a sweep."""
FILES = (TABLE, "table.csv", "cells.csv", "table.md", "table.tex")


@dataclass(frozen=True)
class SweepTable:
    """A sweep's table, read back.

    Attributes:
        against: the row with which the others are compared; None where there is none.
        rows: its rows, stage by stage.
        cells: cell -> its output folder.
    """

    against: str | None
    rows: list[SweepRow]
    cells: dict[str, Path]


@dataclass(frozen=True)
class _Record:
    """``table.json``, as another may have written it."""

    against: str | None
    entries: list[SweepRow]
    cells: dict[str, str]


_RECORD = TypeAdapter(_Record)


def is_sweep(folder: Path) -> bool:
    """Whether this is the output folder of a sweep."""
    return (folder / TABLE).exists()


def write_table(folder: Path, cells: Sequence[SweepCell], against: str | None) -> list[SweepRow]:
    """Sum up the cells on disk, write the table in all its forms, and return its rows, stage by stage."""
    rows = sweep_rows(cells)
    table = {
        "format": FORMAT,
        "against": against,
        "entries": [asdict(row) for row in rows],
        "cells": {str(cell): cell.folder.relative_to(folder).as_posix() for cell in cells},
    }
    write_bytes(folder / TABLE, json.dumps(table, indent=1, ensure_ascii=False).encode())
    write_bytes(folder / "table.csv", rows_csv(rows).encode())
    write_bytes(folder / "cells.csv", cells_csv(rows).encode())
    write_bytes(folder / "table.md", markdown(rows, against).encode())
    write_bytes(folder / "table.tex", latex(rows, against).encode())
    return rows


def drop_table(folder: Path) -> None:
    """Remove the table and the page of a sweep that goes on: until it ends, they are not of its cells."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if (page := folder / PAGE).exists():
        from fedstrata.reports.page import is_foreign  # here: slow to load

        if not is_foreign(page):
            page.unlink()


def read_table(folder: Path) -> SweepTable:
    """A sweep's table, as :func:`write_table` wrote it.

    Raises:
        UserError: the folder holds none, or another version wrote it.
    """
    if path := endless_file(folder):
        raise UserError(f"{path}: is a pipe or a device; expected a file in a sweep's folder")
    try:
        content = (folder / TABLE).read_bytes()
        data = json.loads(content)
        _ = data["entries"]
        check_format(folder, data)
        table = _RECORD.validate_json(content, strict=True)
        cells = {cell: folder / _inside(path) for cell, path in table.cells.items()}
        return SweepTable(table.against, [_whole(row) for row in table.entries], cells)
    except OSError as error:
        raise UserError(f"{folder / TABLE}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{folder / TABLE}: is no sweep's table; running the sweep with --resume writes it"
        ) from None


def _inside(path: str) -> Path:
    """A cell's folder below the sweep's; pages are written into it."""
    if Path(path).is_absolute() or os.pardir in Path(path).parts:
        raise ValueError
    return Path(path)


def _whole(row: SweepRow) -> SweepRow:
    """A row that has a score for each of its seeds, and no spread below none."""
    if len(row.seeds) != len(row.scores) or (row.sd or 0) < 0:
        raise ValueError
    return row
