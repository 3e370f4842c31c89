"""From a job's data tables to examples: rows, labels, shards, tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstrata.data import demo
from fedstrata.data.partition import partition
from fedstrata.data.read import WORD_END, Rows, read
from fedstrata.data.tokens import Tokens, pack, tokenize
from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.tables import Job, Source
from fedstrata.plan.kinds import LANGUAGE, Index
from fedstrata.plan.labels import sort_labels
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.tasks import Examples
from fedstrata.tasks.tag import UNLABELED

TEXTS = {"classify": (1,), "pair": (2,), "regress": (1, 2), "tag": (1,)}
"""Task kind -> how many text columns it reads; ``mlm`` and ``clm`` join any number."""
CLASSES = ("classify", "pair", "tag")
"""Task kinds whose labels are names."""


@dataclass(frozen=True)
class Prepared:
    """A job's rows, divided.

    Attributes:
        train: text and label of every training row that may be used.
        test: of every test row; the same as ``train`` where the clients test on rows of their own.
        shards: client -> its training rows; none of them empty.
        tests: client -> its own test rows; None where one test set serves all.
        labels: class names in order; None for a task without classes.
        by: the values the shards differ in, of a column or of :func:`bands`; None if they differ in size alone.
        left_out: rows dropped because a value was missing.
    """

    train: Rows
    test: Rows
    shards: dict[str, Index]
    tests: dict[str, Index] | None
    labels: tuple[str, ...] | None
    by: Sequence[str] | None
    left_out: int


def prepare(job: Job, near: Path | None = None) -> Prepared:
    """Read a job's rows and divide them among its clients.

    Args:
        job: the job.
        near: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: a file, column, label or split is not usable.
    """
    streams = Streams(job.train.seed)
    kind, text = job.task.kind, _text(job)
    labeled, classes = kind not in LANGUAGE, kind in CLASSES
    extra = [job.clients.column] if job.clients.column else []
    try:
        label = [job.data.label] if labeled or job.clients.partition == "dirichlet" else []
        train = _rows(job, job.data.train, [*text, *label, *extra], near)
    except UserError:
        if labeled or not label or "label" in job.data.model_fields_set:
            raise
        train = _rows(job, job.data.train, [*text, *extra], near)  # plain text: dirichlet deals its sizes
    left_out = train.left_out
    if job.clients.test is not None:
        test = train
    elif job.data.test is None:
        order = streams.numpy(-1, SERVER, "holdout").permutation(len(train))
        held = max(1, round(job.data.holdout * len(train)))
        if held >= len(train):
            raise UserError(f"[data] holdout: {len(train)} rows leave nothing to train on")
        test, train = _take(train, np.sort(order[:held])), _take(train, np.sort(order[held:]))
    else:
        test = _rows(job, job.data.test, [*text, *([job.data.label] if labeled else [])], near)
        left_out += test.left_out
    labels = _labels(job, train, test) if classes else None
    by = None
    if kind in ("classify", "pair") or (kind in LANGUAGE and job.clients.partition == "dirichlet"):
        by = train.columns.get(job.data.label)
    labeling = by
    if kind == "regress":
        _numbers(job, test)
        numbers = _numbers(job, train)
        by = labeling = bands(numbers)
        if job.clients.partition in ("label_sorted", "label_table"):
            labeling = [f"{number:.15g}" for number in numbers]
    values = train.columns[job.clients.column] if job.clients.column else None
    rng = streams.numpy(-1, SERVER, "split")
    shards = partition(job.clients, len(train), labeling, values, rng, labels if labeling is by and labels else ())
    shards = {client: rows for client, rows in shards.items() if len(rows)}
    tests = None if job.clients.test is None else own_tests(job.clients.test, shards, streams)
    if tests is not None:
        shards = {client: np.setdiff1d(rows, tests[client]) for client, rows in shards.items()}
    return Prepared(train, test, shards, tests, labels, by if by is not None else values, left_out)


def prepare_own(job: Job, site: str, near: Path) -> Prepared:
    """A site's rows: those it trains on, and those it is scored on.

    The latter are ``data.test``, or a share ``clients.test`` of the former, kept aside; else there are none.

    Args:
        job: the job, with the site's ``[data]``.
        site: its name.
        near: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: a file or column is not usable, or a label is none of the job's.
    """
    wanted = [*_text(job), *([job.data.label] if job.task.kind not in LANGUAGE else [])]
    train = _rows(job, job.data.train, wanted, near)
    test = train if job.data.test is None else _rows(job, job.data.test, wanted, near)
    labels = _labels(job, train, test) if job.task.kind in CLASSES else None
    everything = {site: np.arange(len(train))}
    tests = {site: np.arange(len(test))}
    if job.data.test is None:
        tests = own_tests(job.clients.test or 0.0, everything, Streams(job.train.seed)) if job.clients.test else {}
    shards = {site: np.setdiff1d(everything[site], tests[site] if test is train and tests else [])}
    return Prepared(train, test, shards, tests, labels, None, train.left_out)


def prepare_test(job: Job, near: Path | None) -> Prepared:
    """What the server of sites has: test rows, if the job names some, and the labels' names.

    The names are the job's; else those of its rows here, of which it reads the training ones for nothing more.

    Raises:
        UserError: a file or column is not usable, or the job has classes and does not name them.
    """
    classes = job.task.kind in CLASSES
    wanted = [*_text(job), *([job.data.label] if job.task.kind not in LANGUAGE else [])]
    none = Rows({name: [] for name in wanted}, 0)
    test = none if job.data.test is None else _rows(job, job.data.test, wanted, near)
    named = job.task.labels is not None
    train = _rows(job, job.data.train, wanted, near) if classes and not named and job.data.train else none
    labels = None
    if classes:
        if not (named or len(train) or len(test)):
            raise UserError(
                "[task] labels: is missing; between sites the job names the classes, as in ['no', 'yes']"
            )
        labels = _labels(job, train, test) if len(train) or len(test) else tuple(job.task.labels or ())
    return Prepared(none, test, {}, None, labels, None, test.left_out)


def bands(numbers: npt.NDArray[np.float64]) -> list[str]:
    """The fifth that each number is in, named by its median; of five values or fewer each is its own."""
    found = np.unique(numbers)
    if len(found) <= 5:
        return [f"{number:g}" for number in numbers]
    place = np.searchsorted(np.quantile(numbers, [0.2, 0.4, 0.6, 0.8]), numbers, side="right")
    names = {i: f"{np.median(numbers[place == i]):.4g}" for i in np.unique(place)}
    return [names[i] for i in place]


def training_texts(job: Job, data: Prepared) -> Iterator[str]:
    """The texts of all clients' training rows, in the order of the rows."""
    text = [job.data.text] if isinstance(job.data.text, str) else job.data.text
    for row in sorted(int(row) for rows in data.shards.values() for row in rows):
        for name in text:
            yield data.train.columns[name][row].replace(WORD_END, " " if job.task.kind == "tag" else WORD_END)


def own_tests(share: float, shards: Mapping[str, Index], streams: Streams) -> dict[str, Index]:
    """Client -> the rows of its own that it tests on: ``share`` of them, at least one, drawn at random.

    Raises:
        UserError: a client would have nothing left to train on.
    """
    tests = {}
    for client, rows in shards.items():
        count = max(1, round(share * len(rows)))
        if count >= len(rows):
            raise UserError(f"[clients] test: {client} has {len(rows)} rows, too few to train and to test on")
        tests[client] = np.sort(streams.numpy(-1, client, "test").permutation(rows)[:count])
    return tests


def tested(kind: str, tests: Mapping[str, Index]) -> dict[str, dict[str, Index]]:
    """Who scores on whose test rows: ``each`` client on its own, one that stands for all on everybody's."""
    if kind == "each":
        return {client: {client: rows} for client, rows in tests.items()}
    return {"all" if kind == "pooled" and len(tests) > 1 else next(iter(tests)): dict(tests)}


def population(kind: str, shards: Mapping[str, Index]) -> dict[str, Index]:
    """The shards a method asks: of ``each`` client, all ``pooled`` into one, or the first ``one``."""
    if kind == "each" or len(shards) == 1:
        return dict(shards)
    if kind == "pooled":
        return {"all": np.sort(np.concatenate(list(shards.values())))}
    first = next(iter(shards))
    return {first: shards[first]}


def examples(
    job: Job, rows: Rows, labels: Sequence[str] | None, tokenizer: Any, holders: Iterable[Index] | None = None
) -> Examples:
    """Tokenized examples of rows; long texts are cut by ``data.long_text``.

    Args:
        job: the job.
        rows: the rows.
        labels: class names, for a task with classes.
        tokenizer: the model's.
        holders: for packing, the rows of each who holds some: only one's own are joined, source by source where
            sources have names; None for one who holds all.
    """
    text = [job.data.text] if isinstance(job.data.text, str) else list(job.data.text)
    columns = [rows.columns[name] for name in text]
    kind, longest = job.task.kind, job.train.max_tokens
    if kind in LANGUAGE and len(columns) > 1:
        columns = [[" ".join(row) for row in zip(*columns, strict=True)]]
    words = kind == "tag"
    long_text = job.data.long_text or ("chunk" if kind in (*LANGUAGE, "tag") else "truncate")
    if len(columns) > 1:
        tokens = tokenize(columns[0], tokenizer, longest, "truncate", seconds=columns[1])
    else:
        tokens = tokenize(columns[0], tokenizer, longest, long_text, WORD_END if words else None)
    pool = np.asarray(rows.pools)
    if long_text == "pack":
        held = [np.arange(len(rows))] if holders is None else holders
        if rows.pools:
            held = [own[pool[own] == name] for own in held for name in dict.fromkeys(pool[own])]
        tokens = pack(tokens, tokenizer, longest, held, kind == "clm")
    pools = {name: tokens.of_rows(np.flatnonzero(pool == name)) for name in dict.fromkeys(rows.pools)}
    if kind == "regress":
        return Examples(tokens, _numbers(job, rows)[tokens.rows], pools)
    if labels is None:
        return Examples(tokens, pools=pools)
    number = {label: i for i, label in enumerate(labels)}
    if words:
        return Examples(tokens, _tags(tokens, rows.columns[job.data.label], number), pools)
    classes = np.asarray([number[label] for label in rows.columns[job.data.label]], dtype=np.int64)
    return Examples(tokens, classes[tokens.rows], pools)


def _text(job: Job) -> list[str]:
    text = [job.data.text] if isinstance(job.data.text, str) else list(job.data.text)
    if len(text) not in TEXTS.get(job.task.kind, (len(text),)):
        legal = " or ".join(("one column", "two columns")[n - 1] for n in TEXTS[job.task.kind])
        raise UserError(f"[data] text: {job.task.kind!r} reads {legal}, found {len(text)}")
    return text


def _numbers(job: Job, rows: Rows) -> npt.NDArray[np.float64]:
    column = job.data.label
    try:
        made = np.asarray([float(value) for value in rows.columns[column]], dtype=np.float64)
    except ValueError as error:
        raise UserError(f"[data] label: column {column!r}: {error}; 'regress' learns numbers") from None
    if not np.isfinite(made).all():
        raise UserError(f"[data] label: column {column!r} holds a number that is not finite")
    return made


def _tags(tokens: Tokens, tags: Sequence[str], number: Mapping[str, int]) -> Index:
    """The class of each token: its word's where it is the word's first piece."""
    classes = [np.asarray([number[tag] for tag in row.split(WORD_END)], dtype=np.int64) for row in tags]
    begins = np.concatenate([[0], np.cumsum([len(row) for row in classes], dtype=np.int64)])
    row = np.repeat(tokens.rows, tokens.lengths)
    every = np.concatenate([*classes, np.empty(0, np.int64)])
    return np.where(tokens.words < 0, UNLABELED, every[(begins[row] + tokens.words).clip(0, len(every) - 1)])


def _rows(job: Job, source: Source, columns: list[str], near: Path | None) -> Rows:
    if isinstance(source, dict):
        each = {pool: _rows(job, one, columns, near) for pool, one in source.items()}
        return Rows(
            {name: [value for rows in each.values() for value in rows.columns[name]] for name in columns},
            sum(rows.left_out for rows in each.values()),
            [pool for pool, rows in each.items() for _ in range(len(rows))],
            {column: names for rows in each.values() for column, names in rows.classes.items()},
        )
    if isinstance(source, str) and source.startswith("demo:"):
        if job.data.documents != "lines":
            raise UserError(f"{source}: [data] documents: {job.data.documents!r} goes with plain txt files alone")
        made = demo.rows(source.removeprefix("demo:"))
        for name in columns:
            if name not in made:
                raise UserError(f"{source}: has no column {name!r}; {did_you_mean(name, made)}")
        return Rows({name: made[name][: job.data.limit] for name in columns}, 0)
    return read(
        source,
        list(dict.fromkeys(columns)),
        names=job.data.columns,
        limit=job.data.limit,
        near=near,
        words=job.task.kind == "tag",
        documents=job.data.documents,
    )


def _take(rows: Rows, index: Index) -> Rows:
    columns = {name: [values[i] for i in index] for name, values in rows.columns.items()}
    return Rows(columns, 0, [rows.pools[i] for i in index] if rows.pools else [], rows.classes)


def _labels(job: Job, train: Rows, test: Rows) -> tuple[str, ...]:
    """The job's labels, else the data set's, else those of all rows: numbers by value, words by the alphabet."""
    column = job.data.label
    each = [_classes(rows.columns[column], job.task.kind == "tag") for rows in (train, test)]
    found = set.union(*each)
    named = train.classes.get(column, [])
    labels = tuple(job.task.labels or (named if found <= set(named) else sort_labels(found)))
    if strange := sorted(found - set(labels)):
        which = "train" if strange[0] in each[0] else "test"
        raise UserError(
            f"[task] labels: the {which} rows also hold {strange[0]!r} in column {column!r}; "
            f"{did_you_mean(strange[0], labels)}"
        )
    if len(labels) < 2:
        raise UserError(f"[data] label: column {column!r} holds only {labels[0]!r}; needs two or more classes")
    return labels


def _classes(values: Sequence[str], words: bool) -> set[str]:
    return {tag for value in set(values) for tag in value.split(WORD_END)} if words else set(values)
