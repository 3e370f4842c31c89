"""What pydantic complains of, in one sentence of our own: [table] key: what is expected, what was found."""

from __future__ import annotations

import datetime
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from fedstrata.errors import did_you_mean
from fedstrata.job.renamed import ELSEWHERE, renamed

TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "Unicode text",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
"""Type of pydantic's error -> what the value must be."""
BOUNDS = {
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "too_short": ("min_length", "needs {} or more entries"),
    "too_long": ("max_length", "takes at most {} entries"),
    "string_too_short": ("min_length", "must not be empty"),
}
"""Type of pydantic's error -> where its context has the bound, and what is expected."""
BRANCH = re.compile(
    r"(list|dict|constrained|function|nullable|union|is-instance)[-\[]|(str|int|float|bool|\[key\])$"
)
"""The words in an error's place that name a type of a union and no key."""


def sentence(error: ValidationError, kind: type[BaseModel], within: str = "", job: Any = None) -> str:
    """The first of pydantic's errors about a table as: [table] key: what is expected, what was found.

    Args:
        error: pydantic's error.
        kind: the class that was to be made.
        within: name of the table that ``kind`` is, which the sentence does not repeat; empty for a whole file.
        job: the class whose tables a misplaced key may belong to; ``kind`` where it is a whole file.
    """
    first, expected = _chosen(error)
    path = [word for word in first["loc"] if not (isinstance(word, str) and BRANCH.match(word))]
    names = [str(word) for word in path]
    in_table = not within and bool(names) and _is_table(kind, names[0])
    if in_table and len(names) == 1 and first["type"] == "value_error":
        return f"[{names[0]}] {first['ctx']['error']}"  # a check of the whole table names the key itself
    place, key = (f"[{names[0]}] ", path[1:]) if in_table and len(names) > 1 else ("", path)
    if first["type"] == "literal_error":  # which names the value, so its place in a list does not matter
        key = [word for word in key if not isinstance(word, int)]
    where = f"{place}{_key(key)}: " if key else ""
    if first["type"] == "value_error":
        return f"{where}{first['ctx']['error']}"
    full = [within, *names] if within else names
    if first["type"] == "extra_forbidden":
        now = renamed(full[0], full[1], first["input"]) if len(full) > 1 else None
        return f"{where}{now or _unknown_key(kind, names, job or kind)}"
    return f"{where}{_complaint(first, full, expected)}"


def shown(value: Any) -> str:
    """A value as a sentence shows it: truth values as TOML writes them, nothing at any length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime.date | datetime.time):
        return str(value)
    if not isinstance(value, str | int | float | list | tuple | dict | None):  # from Python: its type says enough
        return f"a {type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:99]}…"


def _chosen(error: ValidationError) -> tuple[Any, list[str]]:
    """The error to report, and where a value has none of the types that its key takes, all of these.

    A mistyped key is also a missing one: the former is reported. Of the types of a union the one meant is that
    which pydantic got deepest into.
    """
    errors = error.errors(include_url=False)
    first: Any = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    field = _field(first["loc"])
    same = [one for one in errors if _field(one["loc"]) == field]
    deepest = max(same, key=lambda one: len(one["loc"]))
    alike = [one for one in same if len(one["loc"]) == len(deepest["loc"])]
    return deepest, list(dict.fromkeys(TYPES[one["type"]] for one in alike if one["type"] in TYPES))


def _field(place: Sequence[Any]) -> list[Any]:
    """The place of an error up to the first type of a union or place in a list."""
    ends = (i for i, word in enumerate(place) if isinstance(word, int) or BRANCH.match(word))
    return list(place[: next(ends, len(place))])


def _key(path: Sequence[Any]) -> str:
    """A key and the place in its value: ``betas, entry 2``."""
    return ", ".join(f"entry {word + 1}" if isinstance(word, int) else str(word) for word in path)


def _complaint(first: Mapping[str, Any], path: Sequence[str], expected: Sequence[str]) -> str:
    """What is wrong with a value."""
    what, found = first["type"], first["input"]
    if what in ("literal_error", "bool_type") and len(path) > 1 and (now := renamed(path[0], path[1], found)):
        return now
    if what == "missing":
        return "is missing"
    if what == "literal_error":
        words = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return f"{shown(found)} is invalid; {did_you_mean(str(found), words)}"
    if what == "string_pattern_mismatch":
        return f"{shown(found)} is no name; expected letters, digits, - and _"
    if what in BOUNDS:
        bound, words_ = BOUNDS[what]
        limit = first["ctx"][bound]
        huge = isinstance(limit, float) and limit >= 1e15
        text = words_.format(f"{limit:,.0f}" if limit >= 100_000 and not huge else f"{limit:g}")
    elif what in ("model_type", "model_attributes_type") and len(path) == 1:
        text = f"must be a table ([{path[0]}])"
    elif expected:
        text = f"must be {' or '.join(filter(None, [', '.join(expected[:-1]), expected[-1]]))}"
    else:
        text = f"{first['msg'][0].lower()}{first['msg'][1:]}"
    return f"{text}, found {shown(found)}"


def _unknown_key(kind: type[BaseModel], path: Sequence[str], job: type[BaseModel]) -> str:
    """What an unknown key may mean, or in which table of the job it stands."""
    holder = kind
    for word in path[:-1]:
        holder = _table_of(holder, word) or holder
    names = [name for name in holder.model_fields if name != "stage"]
    meant = ELSEWHERE.get(path[-1], path[-1])
    homes = {name: table for name in job.model_fields if (table := _table_of(job, name))}
    there = next((name for name, table in homes.items() if meant in table.model_fields), None)
    if there and not difflib.get_close_matches(meant, names, n=1):
        return f"no such key; did you mean [{there}] {meant}? (expected one of: {', '.join(names)})"
    return f"no such key; {did_you_mean(meant, names)}"


def _is_table(kind: type[BaseModel], key: str) -> bool:
    field = kind.model_fields.get(key)
    return field is not None and (_table_of(kind, key) is not None or typing.get_origin(field.annotation) is dict)


def _table_of(kind: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The class of the table that a key of ``kind`` holds; None where it holds none."""
    annotation = kind.model_fields[key].annotation if key in kind.model_fields else None
    options = (annotation, *typing.get_args(annotation))
    return next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)
