"""Rows handed over as Python objects, in place of a file's name in ``data.train`` or ``data.test``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MappingView, Sequence
from typing import Any


class InMemory:
    """Rows in an object of the caller's own: a data frame, a data set, or a list of dicts.

    Copies of a job share the object. A copy in another process is without it: rows are read where the caller is.

    Attributes:
        rows: the object; None in another process.
        kind: its type, in words.
        count: how many rows it has; None where it does not say.
    """

    def __init__(self, rows: Any, kind: str, count: int | None) -> None:
        self.rows = rows
        self.kind = kind
        self.count = count

    def __deepcopy__(self, memo: Any) -> InMemory:
        return self

    def __reduce__(self) -> Any:
        return InMemory, (None, self.kind, self.count)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return PREFIX + self.kind + ("" if self.count is None else f" of {self.count:,} rows")

    __repr__ = __str__


PREFIX = "python: "
"""With this a recorded job names rows that it does not have."""


def recorded(value: Any) -> Any:
    """What ``data.train`` or ``data.test`` is, as plain data: of rows in memory a text that names them."""
    if isinstance(value, Mapping):
        return {name: recorded(one) for name, one in value.items()}
    return str(value) if isinstance(value, InMemory) else value


def as_source(value: Any) -> Any:
    """What ``data.train`` or ``data.test`` is set to, with objects that hold rows as :class:`InMemory`.

    Args:
        value: a path, a list of paths, a pandas or polars data frame, an Arrow table, a ``datasets.Dataset``, a
            list of dicts, or a dict from names to any of these. Anything else is returned as it is.

    Raises:
        ValueError: it is a whole dictionary of splits, or of columns, or of clients without names, an empty list,
            can be read once only, or has a transform.
    """
    if isinstance(value, str | InMemory):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind := _kind(value):
        return _of_library(value, kind)
    if isinstance(value, Mapping):
        if any(_column(name, one) for name, one in value.items()):
            raise ValueError("is a dictionary of columns; expected a frame, rows, or clients -> rows")
        if other := [name for name in value if not isinstance(name, str)]:
            raise ValueError(f"names a client {other[0]!r}; expected a text, such as {f'client-{other[0]}'!r}")
        return {name: as_source(one) for name, one in value.items()}
    if isinstance(value, Iterator | MappingView):
        why = "which is read once only" if isinstance(value, Iterator) else "a view of a dictionary"
        raise ValueError(f"is a {type(value).__name__}, {why}; expected a list of its rows")
    if isinstance(value, list | tuple):
        return _listed(value)
    return value


def _of_library(value: Any, kind: str) -> InMemory:
    """The rows of an object of a library's, by what it is called."""
    if kind == "DatasetDict":
        names = ", ".join(map(repr, value))
        raise ValueError(f"is a DatasetDict of the splits {names}; hand over one of them, such as splits['train']")
    if kind == "datasets.Dataset" and value.format["type"] == "custom":  # other formats change types alone
        raise ValueError("has a transform (with_transform), which is not applied; expected rows made by its map")
    return InMemory(value, kind, _count(value))


def _listed(value: Sequence[Any]) -> Any:
    """Rows in a list, or the files of one."""
    if not value:
        raise ValueError("is an empty list; expected files, or rows")
    if all(isinstance(row, Mapping) for row in value):
        return InMemory(value, "list of dicts", len(value))
    if any(isinstance(row, Mapping) for row in value):
        number, kind = next(
            (i, type(one).__name__) for i, one in enumerate(value, 1) if not isinstance(one, Mapping)
        )
        raise ValueError(f"is a list of rows in which entry {number} is a {kind}; expected a dict for each row")
    return [os.fspath(one) if isinstance(one, os.PathLike) else one for one in value]


def hold(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job as a mapping, with objects that hold rows as :class:`InMemory` in ``[data]`` of each stage.

    Raises:
        ValueError: see :func:`as_source`; the sentence begins with the key.
    """
    held = dict(job)
    if isinstance(held.get("data"), Mapping):
        held["data"] = {key: held_value(f"data.{key}", value) for key, value in held["data"].items()}
    if isinstance(held.get("stages"), list):
        held["stages"] = [hold(stage) if isinstance(stage, Mapping) else stage for stage in held["stages"]]
    return {key: _paths_as_texts(value) for key, value in held.items()}


def _paths_as_texts(value: Any) -> Any:
    """A value of a job, in which what Python gives as a path is its text, as in a file."""
    if isinstance(value, dict):
        return {key: _paths_as_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_paths_as_texts(one) for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def held_value(key: str, value: Any) -> Any:
    """The value of a dotted key, with objects that hold rows as :class:`InMemory` where the key is one of rows."""
    table, _, name = key.rpartition(".")
    if table.rpartition(".")[2] != "data" or name not in ("train", "test"):
        return _paths_as_texts(value)
    try:
        return as_source(value)
    except ValueError as error:
        raise ValueError(f"[data] {name}: {error}") from None


def _kind(value: Any) -> str:
    """What an object that holds rows is called; empty for any other. Asked by shape: no library is imported."""
    library, name = type(value).__module__.partition(".")[0], type(value).__name__
    known = {
        ("pandas", "DataFrame"): "pandas DataFrame",
        ("polars", "DataFrame"): "polars DataFrame",
        ("polars", "LazyFrame"): "polars LazyFrame",
        ("pyarrow", "Table"): "Arrow table",
        ("datasets", "Dataset"): "datasets.Dataset",
        ("datasets", "DatasetDict"): "DatasetDict",
    }
    return known.get((library, name), "")


def _column(name: str, value: Any) -> bool:
    """Whether an entry of a dictionary is a column's values: neither rows nor the names of sources."""
    if hasattr(value, "tolist") or (isinstance(value, Mapping) and not _kind(value)):
        return True
    if not isinstance(value, list | tuple) or any(isinstance(one, Mapping) for one in value):
        return False
    return not all(
        isinstance(one, os.PathLike) or (isinstance(one, str) and _names_source(one, bare=name != "text"))
        for one in value
    )


def _names_source(text: str, bare: bool) -> bool:
    """Whether a text may name a file, a folder or a data set.

    It has an ending, or is there, or, where ``bare`` words may be names, has no blank in it.
    """
    ending = re.search(r"\.\w{1,8}$", text)
    return bool(ending or (bare and not re.search(r"\s", text))) or os.path.exists(text)


def _count(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None
