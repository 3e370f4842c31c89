"""Whether the first line of a table names its columns or is a row like the others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedstrata.data.column_names import CLIENTS, LABELS, TEXTS, plain_name

USUAL = {*TEXTS, *LABELS, *CLIENTS}


def is_header(first: Sequence[str], rows: Sequence[Sequence[str]], wanted: Sequence[str] = ()) -> bool:
    """Whether a table's first line is a header.

    It is one if it has all columns that the user names, or a usual name of a column; else if its fields look like
    titles. But for the first, a value that stands again in its column shows that the line is a row.

    Args:
        first: the fields of the first line.
        rows: those of the lines below it, or of some of them.
        wanted: columns that the user names.
    """
    if wanted and set(wanted) <= set(first):
        return True
    below = [row for row in rows if list(row) != list(first)]  # files that were joined have their header again
    columns = [{row[place] for row in below if place < len(row)} for place in range(len(first))]
    again = [field in column for field, column in zip(first, columns, strict=True)]
    if any(plain_name(field) in USUAL and not known for field, known in zip(first, again, strict=True)):
        return True
    filled = [field for field in first if field]
    if not filled or len(first) - len(filled) > 1 or len(set(filled)) < len(filled):
        return False
    if any(known for field, known in zip(first, again, strict=True) if field):
        return False
    if all(map(_title, filled)):
        return True
    values = [[row[place] for row in below if place < len(row)] for place in range(len(first))]
    return all(map(_long_title, filled)) and any(map(_unlike, first, values))


def heads_a_table(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether a first line is the title of a table, whose columns only the second line names."""
    both = [[plain_name(field) for field in line if field] for line in (first, second)]
    return len(both[0]) == 1 < len(both[1]) and both[0][0] not in USUAL and not USUAL.isdisjoint(both[1])


def _title(field: str) -> bool:
    """Whether a field may be a column's title: a few words that are no number and no sentence."""
    return bool(re.fullmatch(r"(#\d )?[^\W\d]([^.!?]|\.(?=\w)){0,39}", field)) and len(field.split()) <= 4


def _long_title(field: str) -> bool:
    """Whether a field may be a title as forms have them: a question, or what is to be filled in."""
    return bool(re.fullmatch(r"\D{1,80}", field)) and len(field.split()) <= 12


def _unlike(field: str, values: Sequence[str]) -> bool:
    """Whether a field is of another kind than those below it: numbers, dates, or few values that repeat."""
    filled = [value for value in values if value.strip()]
    few = len(set(filled)) <= len(filled) // 6
    return bool(field and filled) and (few or all(map(_figures, filled)))


def _figures(value: str) -> bool:
    """Whether a value is a number or a date."""
    return any(map(str.isdigit, value)) and sum(map(str.isalpha, value)) <= 3
