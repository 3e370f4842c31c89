"""The first rows of a file or folder of which nothing is known yet: its columns and some of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fedstrata.data.forms import extension, records
from fedstrata.data.forms.data_sets import saved, saved_columns
from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.objects import parquet_columns
from fedstrata.data.forms.plain import document_records, shape_of, txt_records
from fedstrata.data.forms.tables import first_rows, likeliest_delimiter
from fedstrata.data.forms.text import full_lines
from fedstrata.data.header import is_header
from fedstrata.data.read import WORD_END, files_in, read
from fedstrata.errors import UserError

ROWS = 5_000
"""Rows that are looked at."""
TAG = re.compile(r"[BILUES]-\S+|O")
"""A tag of a word in one of the IOB schemes."""
WORD_FILES = (".conll", ".iob", ".iob2", ".bio")


@dataclass(frozen=True)
class Sample:
    """What the first rows of a source show.

    Attributes:
        columns: column -> its values in these rows, as they were read.
        names: names given to the columns of a file without a header line; None where it has them.
        words: a file of a word and its tag per line.
        whole: whether these are all the rows.
    """

    columns: Mapping[str, list[Any]]
    names: list[str] | None = None
    words: bool = False
    whole: bool = True

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def sample(path: Path, wanted: Sequence[str] = ()) -> Sample:
    """Look at the first rows of a file, or of a folder that is one source of rows.

    Args:
        path: the file or folder.
        wanted: columns that it is known to have.

    Raises:
        UserError: it is missing, empty, or of no known kind, or has two columns of one name.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return _folder(path, wanted)
    if extension(path) == ".parquet":
        return _taken(records(path, How(tuple(parquet_columns(path)))), path)
    if _of_words(path):
        rows = read(str(path), How(("text", "label"), words=True), ROWS)
        columns = {name: [value.split(WORD_END) for value in rows.columns[name]] for name in rows.columns}
        return Sample(columns, words=True, whole=len(rows) < ROWS)
    first = next(full_lines(path, How(())), (0, ""))[1] if extension(path) == ".txt" else ""
    if extension(path) in (".csv", ".tsv", ".tab") or ("\t" in first and shape_of(path, How(())) == "plain"):
        return _table(path, wanted)
    return _taken(_plain(path), path)


def _plain(path: Path) -> Records:
    """The records of a file that is no table by its extension, with all columns it shows."""
    if extension(path) != ".txt":
        return records(path, How(()))
    if shape_of(path, How(())) in ("json", "pubmed"):
        return txt_records(path, How(()))
    for wanted in (("text", "label"), ("text",)):
        with suppress(UserError):
            if next(txt_records(path, How(wanted)), None):
                return txt_records(path, How(wanted))
    raise UserError(f"{path}: is empty, expected rows")


def _folder(path: Path, wanted: Sequence[str]) -> Sample:
    if saved(path):
        from fedstrata.data.forms.data_sets import saved_records

        return _taken(saved_records(path, How(tuple(saved_columns(path)))), path)
    files = files_in(path)
    if files and all(extension(file) == ".txt" for file in files):
        return _taken(document_records(path, files, How(())), path)
    if not files:
        raise UserError(f"{path}: the folder holds no file of a known kind")
    first = sample(files[0], wanted)
    return replace(first, whole=first.whole and len(files) == 1)


def _taken(rows: Records, path: Path) -> Sample:
    taken = [row for _, row in islice(rows, ROWS + 1)]
    if not taken:
        raise UserError(f"{path}: is empty, expected rows")
    names = dict.fromkeys(name for row in taken for name in row if name)  # pandas leaves its index without one
    columns = {name: [row.get(name) for row in taken[:ROWS]] for name in names}
    return Sample(columns, whole=len(taken) <= ROWS)


def _table(path: Path, wanted: Sequence[str]) -> Sample:
    """Of a file with fields between delimiters; whether its first line is a header is told by how it differs."""
    between = "\t" if extension(path) != ".csv" else likeliest_delimiter(path, How(()))
    if extension(path) == ".csv":
        rows = first_rows(path, How(()), between, ROWS)
    else:
        rows = [line.split(between) for _, line in islice(full_lines(path, How(())), ROWS)] or [[]]
    titles = [field.strip().strip('"') for field in rows[0]]
    named = not titles or is_header(titles, rows[1:], wanted)
    if named:
        check(path, titles, [title for title in titles if title])
    names = None if named else [f"column{number}" for number in range(1, len(titles) + 1)]
    found = _taken(records(path, How((), names=names, delimiter=None if between == "," else between)), path)
    return Sample(found.columns, names, whole=found.whole)


def _of_words(path: Path) -> bool:
    """Whether a file has a word and its tag in each line, by its extension or its first lines."""
    if extension(path) in WORD_FILES:
        return True
    if extension(path) not in (".txt", ".tsv", ".tab"):
        return False
    fields = [line.split() for _, line in islice(full_lines(path, How(())), 1, 200)]
    fields = [line for line in fields if line and line[0] != "-DOCSTART-"]
    short = bool(fields) and all(2 <= len(line) <= 6 for line in fields)
    return short and all(TAG.fullmatch(line[-1]) for line in fields)
