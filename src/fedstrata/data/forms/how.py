"""How files are read: what a job says of them, and what is found in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError, did_you_mean, plural

Records = Iterator[tuple[str, Mapping[str, Any]]]
"""Where a row stands, for error messages, and its values by column."""
Findings = dict[str, dict[str, None]]
"""File or column -> what was found out about it, in this order."""


@dataclass(frozen=True)
class How:
    """How the files of one source are read.

    Attributes:
        wanted: columns every file must have; there may be more in a record.
        names: column names of files that have no header line.
        words: each value is a list of words; text files then have a word per line.
        owner: the wanted column that says whose a row is: one value, even where the others are lists of words.
        documents: what is a row of a plain txt file: see :func:`fedstrata.data.forms.plain.plain_records`.
        delimiter: what stands between the fields of a line; None to find out.
        encoding: of text files; None to find out.
        classes: takes the class names that a data set gives a column.
        found: takes what reading has found out by itself.
    """

    wanted: tuple[str, ...]
    names: list[str] | None = None
    words: bool = False
    owner: str | None = None
    documents: str = "lines"
    delimiter: str | None = None
    encoding: str | None = None
    classes: dict[str, list[str]] = field(default_factory=dict)
    found: Findings = field(default_factory=dict)

    def note(self, path: Path | str, finding: str) -> None:
        """Keep what was found out about a file, for the user to read."""
        self.found.setdefault(str(path), {})[finding] = None


def together(*several: Findings) -> Findings:
    """What was found out in several readings."""
    whole: Findings = {}
    for found in several:
        for path, findings in found.items():
            whole.setdefault(path, {}).update(findings)
    return whole


def notes(found: Findings) -> list[str]:
    """What was found out, a line for all files that are alike, such as ``a.csv: delimiter ';'``."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, findings in found.items():
        alike.setdefault(tuple(findings), []).append(path)
    return [f"{_some(paths)}: {', '.join(findings)}" for findings, paths in alike.items()]


def _some(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {plural(len(paths) - 1, 'file')} like it"


def check(where: Path | str, there: Sequence[str], wanted: Sequence[str], hint: str = "") -> None:
    """Check that every wanted column occurs exactly once.

    Raises:
        UserError: it is not.
    """
    for column in wanted:
        if there.count(column) != 1:
            if column in there:
                raise UserError(f"{where}: has {there.count(column)} columns {column!r}; expected one{hint}")
            raise UserError(f"{where}: has no column {column!r}; {did_you_mean(column, there)}{hint}")
