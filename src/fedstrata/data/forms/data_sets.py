"""Data sets of the library of that name: from the hub, saved to a folder, or written as Parquet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.data.forms.how import How, Records, check
from fedstrata.errors import UserError

HUB_ID = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([^#]+))?(?:#(.+))?")
"""``name`` or ``name:config``, either with ``#split``."""
SPLITS, ROWS = ("dataset_dict.json",), ("dataset_info.json", "state.json")
"""The files that ``save_to_disk`` writes beside the splits, and those beside the rows of one."""


def saved(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk``."""
    return any(all((path / name).is_file() for name in names) for names in (SPLITS, ROWS))


def _load(path: Path) -> Any:
    import datasets  # slow to load and seldom needed

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: is no readable folder of save_to_disk ({reason})") from None


def saved_columns(path: Path) -> list[str]:
    """The columns of a data set saved to a folder, of one with splits those of its first.

    Raises:
        UserError: it cannot be read.
    """
    names = _load(path).column_names
    return list(next(iter(names.values())) if isinstance(names, dict) else names)


def saved_records(path: Path, how: How) -> Records:
    """Of a data set saved to a folder; of one with splits, of the split ``train``.

    Raises:
        UserError: it cannot be read, has no such split, or lacks a column.
    """
    data = _load(path)
    if isinstance(data, dict):  # of splits
        splits = ", ".join(data)
        if "train" not in data:
            raise UserError(
                f"{path}: holds the splits {splits}; name the folder of one, such as {path / next(iter(data))}"
            )
        how.note(path, f"data set of save_to_disk, split train of {splits}")
        data = data["train"]
    else:
        how.note(path, "data set of save_to_disk")
    yield from data_set_records(str(path), data, how)


def hub_records(source: str, identity: re.Match[str], how: How, missing: str, hint: str) -> Records:
    """Of a data set id, by default the split ``train``.

    Args:
        source: the id.
        identity: its match of :data:`HUB_ID`.
        how: how it is read.
        missing: the first half of the sentence that is said if it cannot be had.
        hint: its end.

    Raises:
        UserError: it cannot be had, or lacks a column.
    """
    import datasets  # slow to load and seldom needed

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # do not report downloads
    name, config, split = identity.groups()
    try:
        data = datasets.load_dataset(name, config, split=split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{missing}, nor reachable as a data set id ({reason}){hint}") from None
    yield from data_set_records(source, data, how)


def data_set_records(source: str, data: Any, how: How) -> Records:
    """Of a loaded data set, which ``source`` names in error messages.

    Raises:
        UserError: it lacks a column.
    """
    check(source, data.column_names, how.wanted)
    data = data.with_format(None).select_columns(list(how.wanted))  # else values may be tensors
    classes = _classes(data.features, how)
    for number, row in enumerate(data, 1):
        where = f"{source}, row {number}"
        yield where, named_classes(where, row, classes)


def _classes(features: Mapping[str, Any], how: How) -> dict[str, list[str]]:
    """The wanted columns of classes, or of lists of classes, and their names."""
    import datasets

    inner = {column: getattr(features[column], "feature", features[column]) for column in how.wanted}
    named = {column: kind.names for column, kind in inner.items() if isinstance(kind, datasets.ClassLabel)}
    how.classes.update(named)
    return named


def named_classes(where: str, row: dict[str, Any], classes: Mapping[str, list[str]]) -> dict[str, Any]:
    """A row in which classes stand by their names instead of their numbers; -1 marks one that is missing.

    Args:
        where: the row stands, for the error message.
        row: its values by column, which is changed.
        classes: column -> the names of its classes, in the order of their numbers.

    Raises:
        UserError: a number has no name.
    """

    def name(column: str, number: Any) -> Any:
        if number == -1 or not isinstance(number, int):
            return None if number == -1 else number
        names = classes[column]
        if not 0 <= number < len(names):
            raise UserError(
                f"{where}: has the class {number} in column {column!r}; expected 0 to {len(names) - 1}, as its "
                f"data set names {len(names)} classes"
            )
        return names[number]

    for column in classes:
        value = row[column]
        row[column] = [name(column, one) for one in value] if isinstance(value, list) else name(column, value)
    return row
