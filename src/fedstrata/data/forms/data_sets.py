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
    kinds = class_labels(data.features, how)
    for number, row in enumerate(data, 1):
        yield f"{source}, row {number}", named_classes(row, kinds)


def class_labels(features: Any, how: How) -> dict[str, Any]:
    """The columns of classes, or of lists of classes, and their kind; ``how`` takes their names.

    Args:
        features: of a data set, or the Arrow schema of its file.
        how: how it is read.
    """
    import datasets

    if not isinstance(features, datasets.Features):
        features = datasets.Features.from_arrow_schema(features)
    inner = {column: getattr(features[column], "feature", features[column]) for column in how.wanted}
    kinds = {column: kind for column, kind in inner.items() if isinstance(kind, datasets.ClassLabel)}
    how.classes.update({column: list(kind.names) for column, kind in kinds.items()})
    return kinds


def named_classes(row: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A row in which classes stand by their names; -1 marks one that is missing."""
    for column, kind in kinds.items():
        value = row[column]
        if isinstance(value, list):
            row[column] = [None if number in (None, -1) else kind.int2str(number) for number in value]
        else:
            row[column] = None if value in (None, -1) else kind.int2str(value)
    return row
