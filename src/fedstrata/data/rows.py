"""A job's rows as they are read: which columns, from which sources, and what their labels are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstrata.data import demo
from fedstrata.data.forms.how import How, together
from fedstrata.data.labels import MISSING, decimal_points, doubtful, named_tags, one_number, refuse_several
from fedstrata.data.read import WORD_END, Rows, read
from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.data_tables import Source
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.plan.labels import alike, sort_labels


def text_columns(job: Job) -> list[str]:
    """The columns that hold the text.

    Raises:
        UserError: the task does not read so many, one is there twice, or one of them is the label's.
    """
    text = [job.data.text] if isinstance(job.data.text, str) else list(job.data.text)
    if TASK_KINDS[job.task.kind].labeled and job.data.label in text:
        raise UserError(f"[data] label: column {job.data.label!r} is also the text; expected another column")
    counts = TASK_KINDS[job.task.kind].texts
    if counts and len(text) not in counts:
        expected = " or ".join(("one column", "two columns")[n - 1] for n in counts)
        raise UserError(f"[data] text: {job.task.kind!r} reads {expected}, found {len(text)}")
    if len(set(text)) < len(text):
        raise UserError(f"[data] text: names column {text[0]!r} twice; expected two different columns")
    return text


def wanted_columns(job: Job) -> list[str]:
    """The columns of the text and, where the task has labels, of the label."""
    return [*text_columns(job), *([job.data.label] if TASK_KINDS[job.task.kind].labeled else [])]


def read_rows(job: Job, source: Source, columns: list[str], base_dir: Path | None) -> Rows:
    """The rows of a source as the job's ``[data]`` has them read.

    Args:
        job: the job.
        source: its ``data.train`` or ``data.test``; the names of named sources become the rows' ``pools``.
        columns: the wanted columns.
        base_dir: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: a source or a column is not usable.
    """
    if isinstance(source, dict):
        pools = {name: read_rows(job, files, columns, base_dir) for name, files in source.items()}
        return Rows(
            {column: [value for rows in pools.values() for value in rows.columns[column]] for column in columns},
            sum(rows.dropped for rows in pools.values()),
            [name for name, rows in pools.items() for _ in range(len(rows))],
            {column: names for rows in pools.values() for column, names in rows.classes.items()},
            together(*(rows.found for rows in pools.values())),
            array("q", [number for rows in pools.values() for number in rows.numbers]),
            added(*(rows.lacking for rows in pools.values())),
        )
    if isinstance(source, str) and source.startswith("demo:"):
        return _demo_rows(job, source, columns)
    data, kind = job.data, TASK_KINDS[job.task.kind]
    how = How(
        wanted=tuple(dict.fromkeys(columns)),
        names=data.columns,
        words=kind.words,
        owner=None if job.clients.column in wanted_columns(job) else job.clients.column,
        documents=data.documents,
        delimiter=data.delimiter,
        encoding=data.encoding,
    )
    rows = read(source, how, data.limit, base_dir)
    if data.label in rows.columns and kind.words:
        return named_tags(rows, data.label, job.task.labels)
    if kind.target == "class" and not (job.task.labels or rows.classes):  # else they are meant
        return doubtful(rows, data.label)
    numbers = data.label in rows.columns and kind.target == "number"
    return one_number(decimal_points(rows, data.label), data.label) if numbers else rows


def _demo_rows(job: Job, source: str, columns: list[str]) -> Rows:
    if job.data.documents != "lines":
        raise UserError(f"{source}: [data] documents: {job.data.documents!r} goes with plain txt files alone")
    found = demo.rows(source.removeprefix("demo:"))
    for name in columns:
        if name not in found:
            raise UserError(f"{source}: has no column {name!r}; {did_you_mean(name, found)}")
    made = {name: found[name][: job.data.limit] for name in columns}
    return Rows(made, 0, numbers=array("q", range(max(map(len, made.values()), default=0))))


def added(*counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by name, added up."""
    return {name: sum(one.get(name, 0) for one in counts) for name in dict.fromkeys(chain(*counts))}


def no_rows(columns: Sequence[str]) -> Rows:
    """No rows, with the given columns."""
    return Rows({name: [] for name in columns}, 0)


def take(rows: Rows, index: Index) -> Rows:
    """The rows at ``index``, in its order; none of them counts as dropped."""
    columns = {name: [values[i] for i in index] for name, values in rows.columns.items()}
    pools = [rows.pools[i] for i in index] if rows.pools else []
    numbers = array("q", [rows.numbers[i] for i in index] if rows.numbers else [])
    return Rows(columns, 0, pools, rows.classes, rows.found, numbers)


def class_names(job: Job, train: Rows, test: Rows) -> tuple[str, ...]:
    """The job's labels, else the data set's, else those of all rows: numbers by value, words by the alphabet.

    Raises:
        UserError: the rows hold a label that the job does not name, all the same one, or labels of which some seem
            to be one (:func:`check_labels`), or test rows have no class of the training rows.
    """
    column = job.data.label
    in_train, in_test = (_classes(rows.columns[column], TASK_KINDS[job.task.kind].words) for rows in (train, test))
    found = in_train | in_test
    named = train.classes.get(column, [])
    if not found <= set(job.task.labels or named):  # else they are meant, whatever they look like
        refuse_several(column, found)
    if job.task.labels is None:
        check_labels(column, found)
        if in_train and in_test and not in_train & in_test:
            raise UserError(
                f"[data] label: column {column!r} holds {_listed(in_train)} in the training rows, "
                f"{_listed(in_test)} in the test rows, no class in both; write the classes alike, or name all in "
                "task.labels"
            )
    labels = tuple(job.task.labels or (named if found <= set(named) else sort_labels(found)))
    if unknown := sorted(found - set(labels)):
        which = "train" if unknown[0] in in_train else "test"
        raise UserError(
            f"[task] labels: the {which} rows also hold {unknown[0]!r} in column {column!r}; "
            f"{did_you_mean(unknown[0], labels)}"
        )
    if len(labels) < 2:
        raise UserError(f"[data] label: column {column!r} holds only {labels[0]!r}; needs two or more classes")
    return labels


def check_labels(column: str, labels: Iterable[str]) -> None:
    """Refuse labels of a column that are a missing value, or two spellings of one; ``task.labels`` permits them.

    Raises:
        UserError: there are such labels.
    """
    named = "if they are classes, name all classes in task.labels"
    for one, other, how in alike(labels):
        raise UserError(
            f"[data] label: column {column!r} holds {one!r} and {other!r}, which {how}, perhaps in two files; "
            f"write one of them everywhere, or {named}"
        )
    if missing := next((label for label in labels if label.strip().lower() in MISSING), None):
        raise UserError(
            f"[data] label: column {column!r} holds {missing!r}, which stands for a missing value; leave these "
            f"rows out, or {named}"
        )


def _listed(classes: Iterable[str]) -> str:
    """The first four classes, in words."""
    return ", ".join(map(repr, sort_labels(classes)[:4]))


def _classes(values: Sequence[str], words: bool) -> set[str]:
    return {tag for value in set(values) for tag in value.split(WORD_END)} if words else set(values)


def label_numbers(job: Job, rows: Rows) -> npt.NDArray[np.float64]:
    """The labels of rows as numbers, ``[n]``.

    Raises:
        UserError: one of them is no number, or not a finite one.
    """
    column = job.data.label
    try:
        numbers = np.asarray([_number(value) for value in rows.columns[column]], dtype=np.float64)
    except ValueError as error:
        raise UserError(f"[data] label: column {column!r}: {error}; {job.task.kind!r} needs numbers") from None
    if not np.isfinite(numbers).all():
        raise UserError(f"[data] label: column {column!r} holds a number that is not finite")
    return numbers


def _number(text: str) -> float:
    if "_" in text:  # Python alone takes 1_5, which may be a slip for 1.5, for 15
        raise ValueError(f"could not convert string to float: {text!r}")
    return float(text)


def bands(numbers: npt.NDArray[np.float64]) -> list[str]:
    """The fifth that each number is in, named by its median; of five values or fewer each is its own."""
    found = np.unique(numbers)
    if len(found) <= 5:
        return [f"{number:g}" for number in numbers]
    place = np.searchsorted(np.quantile(numbers, [0.2, 0.4, 0.6, 0.8]), numbers, side="right")
    names = {i: f"{np.median(numbers[place == i]):.4g}" for i in np.unique(place)}
    return [names[i] for i in place]
