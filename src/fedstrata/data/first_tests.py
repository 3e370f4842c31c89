"""Which rows of a first job go together, training rows and test rows; and which columns it does not use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstrata.data.column_names import plain_name
from fedstrata.data.first_files import TEST_NAMES, TRAIN_NAMES, Sources, files_of
from fedstrata.data.guess import Guess
from fedstrata.data.sample import ROWS, Sample, sample
from fedstrata.data.values import is_filled
from fedstrata.errors import UserError, did_you_mean, plural
from fedstrata.job.task_kinds import TASK_KINDS

SPLITS = ("split", "set", "subset")
"""How a column is called that says which rows are test rows."""


def test_rows(
    test: Path | None, beside: Sequence[Sources], found: Guess, rows: Sample
) -> tuple[Sources | None, list[Sources]]:
    """The test rows, named by the user or the first beside the training rows that fit; and those that do not fit.

    Raises:
        UserError: those that the user names do not go with the training rows.
    """
    if test is None:
        fitting = [one for one in beside if _fits(one, found, rows)]
        return next(iter(fitting), None), [one for one in beside if one not in fitting]
    if lack := _lack(test, found, rows):
        raise UserError(f"--test: {test}: {lack}")
    return test, []


def _fits(test: Sources, found: Guess, rows: Sample) -> bool:
    """Whether what lies beside training rows can test what is trained on them."""
    try:
        return not _lack(test, found, rows)
    except UserError:
        return False


def _lack(test: Sources, found: Guess, rows: Sample) -> str:
    """Why test rows do not go with the training rows; empty where they do.

    Raises:
        UserError: they cannot be read.
    """
    wanted = [found.text] if isinstance(found.text, str) else list(found.text)
    wanted += [found.label] if found.label else []
    there = together([sample(file, wanted, tagged=found.kind == "tag") for file in files_of(test)])
    if (there.names is None) != (rows.names is None):
        return "expected a header line in both the training and the test rows, or in neither"
    if missing := next((name for name in wanted if name not in there.columns), None):
        return f"has no column {missing!r} as the training rows have; {did_you_mean(missing, there.columns)}"
    if blank := next((name for name in wanted if not any(map(is_filled, there.columns[name]))), None):
        return f"no row has a value in column {blank!r}, which test rows need"
    if found.label is None or not (rows.whole and there.whole):
        return ""
    known, tested = ({*map(str, filter(is_filled, one.columns[found.label]))} for one in (rows, there))
    if TASK_KINDS[found.kind].target == "class" and not known & tested:
        return f"column {found.label!r} holds {min(tested)!r:.40}, and no class of the training rows"
    if TASK_KINDS[found.kind].target == "number" and len(there) > 1 and len(tested) == 1:
        return f"column {found.label!r} is {min(tested)} in every row, and a correlation with it means nothing"
    return ""


def check_columns(samples: Mapping[Path, Sample], found: Guess) -> None:
    """Refuse training rows of several files of which one lacks a column that the first has.

    Raises:
        UserError: one does.
    """
    wanted = [found.text] if isinstance(found.text, str) else list(found.text)
    wanted += [found.label] if found.label else []
    for path, rows in samples.items():
        if missing := next((name for name in wanted if name not in rows.columns), None):
            raise UserError(
                f"{path}: has no column {missing!r} as {next(iter(samples))} has; "
                f"{did_you_mean(missing, rows.columns)}"
            )


def unused_lines(rows: Sample, found: Guess) -> list[str]:
    """Of columns from which a user may think that something follows: that nothing does."""
    texts = [found.text] if isinstance(found.text, str) else list(found.text)
    return [*_split_lines(rows, (found.label, found.client)), *_nested_lines(rows, texts)]


def _split_lines(rows: Sample, used: Sequence[str | None]) -> list[str]:
    """Of a column that says which rows are test rows: that nothing follows from it."""
    lines = []
    for name in (name for name in rows.columns if name not in used):
        values = {str(value).strip().lower() for value in rows.columns[name] if is_filled(value)}
        if not values or not values <= {*TRAIN_NAMES, *TEST_NAMES}:
            continue
        if values - {*TRAIN_NAMES} or plain_name(name) in SPLITS:
            lines.append(
                f"unused  column {name!r} ({', '.join(sorted(values))}): rows are trained on whatever it says; "
                "put its test rows into a file of their own"
            )
    return lines


def _nested_lines(rows: Sample, texts: Sequence[str]) -> list[str]:
    """Of columns with lists or tables in each row: that their words are not read, where most words stand there."""
    read = sum(_words(value) for name in texts for value in rows.columns[name])
    return [
        f"unused  column {name!r}: most words stand there, in lists or tables, which are not read; expected a "
        "row for each text"
        for name, values in rows.columns.items()
        if name not in texts and sum(_words(value) for value in values if isinstance(value, list | dict)) > read
    ]


def _words(value: Any) -> int:
    """The words of a value, and of all that a list or table holds."""
    if isinstance(value, dict):
        return sum(map(_words, value.values()))
    if isinstance(value, list):
        return sum(map(_words, value))
    return len(value.split()) if isinstance(value, str) else 0


def together(samples: Sequence[Sample]) -> Sample:
    """The first rows of all clients, as many of each: one alone may have a single class."""
    first, most = samples[0], ROWS // len(samples) + 1
    if not samples[1:]:
        return first
    columns = {
        name: [value for one in samples for value in one.columns.get(name, [None] * len(one))[:most]]
        for name in first.columns
    }
    return replace(first, columns=columns, whole=all(one.whole and len(one) <= most for one in samples))


def shown(source: Sources) -> str:
    """A source by the name of its first file."""
    first, *more = files_of(source)
    return f"{first} and {plural(len(more), 'file')} more" if more else str(first)


def test_lines(tested: Sources | None, unfit: Sequence[Sources]) -> list[str]:
    """What is tested on, and what is named as test rows are and cannot be."""
    used = [f"test    {shown(tested)}"] if tested else []
    return [
        *used,
        *(f"unused  {shown(one)}: its rows lack columns or labels of the training rows" for one in unfit),
    ]
