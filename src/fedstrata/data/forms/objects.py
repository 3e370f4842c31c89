"""JSON lines, JSON arrays and Parquet files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fedstrata.data.forms.data_sets import named_classes
from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.text import full_lines, lines, whole
from fedstrata.errors import UserError

BLANK = re.compile(r"[ \t\n\r]*")


class _TwiceError(ValueError):
    """A key that an object has more than once."""


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise _TwiceError(next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at])))
    return table


DECODER = json.JSONDecoder(object_pairs_hook=_table)


def json_records(path: Path, how: How) -> Records:
    """Of a file with an object per line, or with one array of objects, which may stand in an object."""
    seen: dict[str, None] = {}
    for where, row in _values(path, how):
        if not isinstance(row, dict):
            raise UserError(f"{where}: found {json.dumps(row)[:40]}, expected a JSON object")
        if _is_table(row):
            raise UserError(
                f"{where}: is a whole table in one object, as pandas' to_json writes it; expected an object for "
                "each row, as to_json(orient='records') writes"
            )
        seen.update(dict.fromkeys(row))
        yield where, row
    if seen:
        check(path, list(seen), how.wanted)


def _is_table(row: dict[str, Any]) -> bool:
    """Whether an object holds columns by the numbers of rows, rows by their numbers, or both apart."""
    if row.keys() == {"columns", "index", "data"}:
        return all(isinstance(value, list) for value in row.values())
    if not row or not all(isinstance(value, dict) for value in row.values()):
        return False
    return all(map(str.isdecimal, row)) or all(value and all(map(str.isdecimal, value)) for value in row.values())


def _values(path: Path, how: How) -> Iterator[tuple[str, Any]]:
    """One value per line, the entries of one array, or those of the array in one object."""
    full = full_lines(path, how)
    first = next(full, (0, ""))
    start = first[1].lstrip()[:1]
    if start == "[" or (start == "{" and _is_one_object(path, how, first[1])):
        value = parse(path, 1, "".join(line for _, line in lines(path, how)))
        key, rows = ("", value) if start == "[" else _rows_within(value, how)
        if key:
            how.note(path, f"the rows are those under {key!r}")
        for number, row in enumerate(rows, 1):
            yield f"{path}, entry {number}", row
    elif first[1]:
        for number, line in chain([first], full):
            yield f"{path}, line {number}", parse(path, number, line)


def _is_one_object(path: Path, how: How, first: str) -> bool:
    """Whether a JSON file, by its extension, is no file of an object per line, or of one line alone."""
    if not path.name.lower().removesuffix(".gz").endswith(".json"):
        return False
    return not holds_object(first) or len(list(islice(full_lines(path, how), 2))) == 1


def _rows_within(value: dict[str, Any], how: How) -> tuple[str, list[Any]]:
    """The only array of objects in an object that lacks wanted columns, and its key; else the object as a row."""
    arrays = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if len(arrays) != 1 or (how.wanted and set(how.wanted) <= set(value)):
        return "", [value]
    return arrays[0], value[arrays[0]]


def parse(path: Path, number: int, text: str) -> Any:
    """The JSON value of a text that starts at a line of a file.

    Raises:
        UserError: it is none.
    """
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise UserError(
            f"{path}, line {line}: is not JSON ({error.msg} at character {error.colno}); "
            "expected one object per line, or one array of objects"
        ) from None
    except (ValueError, RecursionError) as error:
        what = "holds a number of thousands of digits; expected texts and numbers"
        if isinstance(error, RecursionError):
            what = "is nested too deep; expected texts and numbers"
        elif isinstance(error, _TwiceError):
            what = f"has the key {str(error)!r} twice in one object; expected each key once"
        line = number + text.count("\n", 0, _unreadable(text))
        raise UserError(f"{path}, line {line}: {what}") from None


def _unreadable(text: str) -> int:
    """Where the first entry of an array that Python does not read begins; 0 of another value."""
    at = _skipped(text, 0)
    if not text.startswith("[", at):
        return 0
    with suppress(ValueError, RecursionError):
        while True:
            at = _skipped(text, at + 1)
            at = _skipped(text, DECODER.raw_decode(text, at)[1])
    return at


def _skipped(text: str, at: int) -> int:
    """The place of the next character that is not blank."""
    found = BLANK.match(text, at)
    return found.end() if found else at


def holds_object(text: str) -> bool:
    """Whether a text is a JSON object, even one that :func:`parse` refuses to read."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        return True


def parquet_columns(path: Path) -> list[str]:
    """The columns of a Parquet file.

    Raises:
        UserError: it is none that can be read.
    """
    from pyarrow import ArrowException, parquet  # here, as it is slow to load and seldom needed

    source = whole(path)
    try:
        with parquet.ParquetFile(source) as file:
            return list(file.schema_arrow.names)
    except (ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: is not a readable Parquet file ({reason})") from None


def parquet_records(path: Path, how: How) -> Records:
    """Of a Parquet file; classes that a data set wrote as numbers have the names that it wrote beside them."""
    from pyarrow import ArrowException, parquet  # here, as it is slow to load and seldom needed

    source = whole(path)
    try:
        with parquet.ParquetFile(source) as file:
            schema = file.schema_arrow
            check(path, schema.names, how.wanted)
            classes = schema_classes(schema, how)
            if classes:
                how.note(path, f"class names of {' and '.join(classes)}")
            batches = file.iter_batches(columns=list(how.wanted))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                where = f"{path}, row {number}"
                yield where, named_classes(where, row, classes)
    except (ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: is not a readable Parquet file ({reason})") from None


def schema_classes(schema: Any, how: How) -> dict[str, list[str]]:
    """The wanted columns of classes, or of lists of classes, and their names, by what a data set has written.

    Not read by ``datasets``, which gives up on all columns where it does not know the kind of one.
    """
    kinds: Any = {}
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        kinds = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    found = {column: _names(kinds.get(column)) for column in how.wanted} if isinstance(kinds, dict) else {}
    named = {column: names for column, names in found.items() if names}
    how.classes.update(named)
    return named


def _names(kind: Any) -> list[str]:
    """Those of a column's classes, or of the classes in its lists; none for other columns."""
    inner = kind[0] if isinstance(kind, list) and kind else kind
    if not isinstance(inner, dict):
        return []
    if "feature" in inner:
        return _names(inner["feature"])
    names = inner.get("names") if inner.get("_type") == "ClassLabel" else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []
