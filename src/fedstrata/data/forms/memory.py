"""Rows of data frames, data sets and lists of dicts that a caller hands over from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedstrata.data.forms.data_sets import data_set_records, named_classes
from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.objects import schema_classes
from fedstrata.errors import UserError
from fedstrata.job.in_memory import InMemory


def memory_records(source: InMemory, how: How) -> Records:
    """The records of an object that holds rows.

    Raises:
        UserError: it is not here, or lacks a column.
    """
    where, rows, classes = source.kind, source.rows, dict[str, list[str]]()
    if rows is None:
        raise UserError(
            f"{source}: these rows were handed over from Python; run the job from there, with the rows"
        )
    if source.kind == "datasets.Dataset":
        yield from data_set_records(where, rows, how)
        return
    if source.kind == "list of dicts":
        check(where, list(dict.fromkeys(key for row in rows for key in row)), how.wanted)
        found: Iterable[Mapping[str, Any]] = rows
    elif source.kind == "pandas DataFrame":
        check(where, [str(name) for name in rows.columns], how.wanted)
        found = _frame_rows(rows, how)
    else:
        if source.kind == "polars LazyFrame":
            rows = rows.collect()
        check(where, list(rows.columns if hasattr(rows, "iter_rows") else rows.column_names), how.wanted)
        if source.kind == "Arrow table":
            classes = schema_classes(rows.schema, how)
        rows = rows.select(list(how.wanted))
        found = rows.iter_rows(named=True) if hasattr(rows, "iter_rows") else rows.to_pylist()
    for number, row in enumerate(found, 1):
        values, place = {name: _plain(row.get(name)) for name in how.wanted}, f"{where}, row {number}"
        yield place, named_classes(place, values, classes)


def _frame_rows(frame: Any, how: How) -> Iterable[Mapping[str, Any]]:
    """The rows of a pandas frame; what it counts as missing is None."""
    names = [str(name) for name in frame.columns]  # a frame without a header has numbers for names
    columns = [frame.iloc[:, names.index(name)].astype(object) for name in how.wanted]
    values = [column.where(column.notna(), None) for column in columns]
    for row in zip(*values, strict=True):
        yield dict(zip(how.wanted, row, strict=True))


def _plain(value: Any) -> Any:
    """A value as a file would give it: arrays and tuples as lists, numpy's numbers as Python's."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if type(value).__name__ == "NAType":  # pandas' missing value, not even equal to itself or not
        return None
    return value
