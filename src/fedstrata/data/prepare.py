"""A job's rows, read and divided: into training and test rows, and among the clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.data.forms.how import notes, together
from fedstrata.data.labels import MAY_BE_MISSING, NO_ENTITY, entity_types
from fedstrata.data.partition import PartitionInput, check_partition, partition
from fedstrata.data.read import WORD_END, Rows
from fedstrata.data.rows import (
    added,
    bands,
    class_names,
    label_numbers,
    no_rows,
    read_rows,
    take,
    text_columns,
    wanted_columns,
)
from fedstrata.errors import UserError, plural
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.plan.labels import alike
from fedstrata.plan.streams import HOLDOUT, OWN_TEST, PARTITION, SERVER, Streams

NO_DATA = "-"
"""``data.train`` of a job that is forecast without data."""
DIRICHLET = ("dirichlet", "dirichlet_mix")
"""Partitions that look at labels also where the task has none."""
ENTITY_TAGS = ("B-", "I-", "E-", "S-")
"""How the tags of entities begin, as seqeval reads them; of one that begins with O it takes all for no entity."""


@dataclass(frozen=True)
class Prepared:
    """A job's rows, divided.

    Attributes:
        train: text and label of every training row.
        test: of every test row; the same as ``train`` where the clients test on rows of their own.
        shards: client -> its training rows; none of them empty.
        tests: client -> its own test rows; None where one test set serves all.
        labels: class names in order; None for a task without classes.
        by: the values the shards differ in, of a column or of :func:`bands`; None if they differ in size alone.
        lacking: column -> rows dropped because they had no value there.
    """

    train: Rows
    test: Rows
    shards: dict[str, Index]
    tests: dict[str, Index] | None
    labels: tuple[str, ...] | None
    by: Sequence[str] | None
    lacking: Mapping[str, int]

    @property
    def dropped(self) -> int:
        """How many rows were dropped because a value was missing."""
        return sum(self.lacking.values())


def prepare(job: Job, base_dir: Path | None = None) -> Prepared:
    """Read a job's rows and divide them among its clients.

    Args:
        job: the job.
        base_dir: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: a file, column, label or partition is not usable.
    """
    check_partition(job.clients)
    return divided(job, *read_sources(job, base_dir))


def read_sources(job: Job, base_dir: Path | None) -> tuple[Rows, Rows | None]:
    """The rows of a job's sources, undivided: of ``data.train``, and of ``data.test`` where that is set.

    They do not depend on the seed, nor on how many clients there are.
    """
    test = job.data.test
    train = _training_rows(job, base_dir)
    return train, None if test is None else read_rows(job, test, wanted_columns(job), base_dir)


def divided(job: Job, train: Rows, test: Rows | None) -> Prepared:
    """What :func:`prepare` gives, of rows as :func:`read_sources` has read them."""
    streams, lacking = Streams(job.train.seed), train.lacking
    if job.clients.test is not None:
        test = train
    elif test is None:
        train, test = _hold_out(job, train, streams)
    else:
        lacking = added(lacking, test.lacking)
    kind = TASK_KINDS[job.task.kind]
    labels = class_names(job, train, test) if kind.classes else None
    if kind.target == "number":
        label_numbers(job, test)  # refuses what is no number
    shards, by = _divide(job, train, labels, streams)
    tests = None if job.clients.test is None else own_tests(job.clients.test, shards, streams)
    if tests is not None:
        shards = {client: np.setdiff1d(rows, tests[client]) for client, rows in shards.items()}
    return Prepared(train, test, shards, tests, labels, by, lacking)


def _training_rows(job: Job, base_dir: Path | None) -> Rows:
    """The training rows with all columns that the task or the partition looks at."""
    labeled = TASK_KINDS[job.task.kind].labeled
    text, label = text_columns(job), [job.data.label]
    extra = [job.clients.column] if job.clients.column else []
    if labeled or job.clients.partition in DIRICHLET:
        try:
            return read_rows(job, job.data.train, [*text, *label, *extra], base_dir)
        except UserError:
            if labeled or "label" in job.data.model_fields_set:
                raise
    return read_rows(job, job.data.train, [*text, *extra], base_dir)  # plain text: dirichlet deals its sizes


def _hold_out(job: Job, rows: Rows, streams: Streams) -> tuple[Rows, Rows]:
    """Training and test rows, out of the training rows."""
    order = streams.numpy(-1, SERVER, HOLDOUT).permutation(len(rows))
    count = max(1, round(job.data.holdout * len(rows)))
    if count >= len(rows):
        raise UserError(f"[data] holdout: leaves none of {plural(len(rows), 'row')} to train on")
    return take(rows, np.sort(order[count:])), take(rows, np.sort(order[:count]))


def _divide(
    job: Job, rows: Rows, classes: Sequence[str] | None, streams: Streams
) -> tuple[dict[str, Index], Sequence[str] | None]:
    """Client -> its rows, without empty clients; and the values that the shards differ in."""
    by, kind = _differing(job, rows), TASK_KINDS[job.task.kind]
    labels, order = by, () if kind.words else classes or ()
    if kind.target == "number" and job.clients.partition in ("label_sorted", "label_table"):
        labels, order = [f"{number:.15g}" for number in label_numbers(job, rows)], ()
    values = rows.columns[job.clients.column] if job.clients.column else None
    shards = partition(
        PartitionInput(
            clients=job.clients,
            rows=len(rows),
            rng=streams.numpy(-1, SERVER, PARTITION),
            labels=labels,
            classes=order,
            values=values,
            sources=rows.pools,
            source_names=source_names(job),
        )
    )
    if by is None:
        by = rows.pools if job.clients.partition == "files" else values
    return {client: own for client, own in shards.items() if len(own)}, by


def _differing(job: Job, rows: Rows) -> Sequence[str] | None:
    """A label of every row: a class, a type of entities, a band of numbers, or what dirichlet looks at."""
    kind = TASK_KINDS[job.task.kind]
    if kind.target == "number":
        return bands(label_numbers(job, rows))
    if kind.words:
        return entity_types(rows.columns[job.data.label])
    if kind.target == "class" or (not kind.labeled and job.clients.partition in DIRICHLET):
        return rows.columns.get(job.data.label)
    return None


def source_names(job: Job) -> tuple[str, ...]:
    """The names of the sources of ``data.train``; empty where they have none."""
    return tuple(job.data.train) if isinstance(job.data.train, dict) else ()


def data_notes(job: Job, data: Prepared) -> list[str]:
    """What reading the rows has found out by itself, and what became of sources with names, a line each."""
    lines = notes(together(data.train.found, data.test.found))
    names = source_names(job)
    if names and job.clients.partition != "files" and not job.between_sites:
        lines.append(
            f"rows of all named sources ({', '.join(names)}) are dealt together by partition = "
            f"{job.clients.partition!r}; 'files' makes each a client"
        )
    if column := job.clients.column:
        values = sorted({*data.train.columns.get(column, ())})
        pairs = list(alike(values))
        listed = "; ".join(f"{one!r} and {other!r} {how}" for one, other, how in pairs[:3])
        if pairs:
            lines.append(f"column {column!r}: {listed}{'; …' if pairs[3:] else ''}; each is a client of its own")
        if missing := next((value for value in values if value.strip().lower() in MAY_BE_MISSING), None):
            lines.append(f"column {column!r}: {missing!r} stands for a missing value, but is a client of its own")
    return [*lines, *_tag_notes(job, data.labels or ())]


def _tag_notes(job: Job, tags: Sequence[str]) -> list[str]:
    """Whether the headline counts entities where tags name none, as parts of speech do."""
    others = [tag for tag in tags if tag != NO_ENTITY and not tag.startswith(ENTITY_TAGS)]
    if not TASK_KINDS[job.task.kind].words or job.task.headline in ("accuracy", "loss") or not others:
        return []
    return [
        f"tag {others[0]!r} is not O and begins with none of {', '.join(ENTITY_TAGS)}: {job.task.headline} counts "
        "entities, so it means little here; task.metric = 'accuracy' counts words"
    ]


def dropped_rows(data: Prepared) -> str:
    """How many rows were dropped, and which column had no value in them."""
    rows = [f"{plural(count, 'row')} without a value in {column!r}" for column, count in data.lacking.items()]
    return f"{' and '.join(rows) or 'no row'} dropped"


def prepare_own(job: Job, site: str, base_dir: Path) -> Prepared:
    """A site's rows: those it trains on, and those it is scored on.

    The latter are ``data.test``, or a held-out share ``clients.test`` of the former; else there are none.

    Args:
        job: the job, with the site's ``[data]``.
        site: its name.
        base_dir: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: a file or column is not usable, or a label is none of the job's.
    """
    train = read_rows(job, job.data.train, wanted_columns(job), base_dir)
    test = train if job.data.test is None else read_rows(job, job.data.test, wanted_columns(job), base_dir)
    lacking = train.lacking if test is train else added(train.lacking, test.lacking)
    labels = class_names(job, train, test) if TASK_KINDS[job.task.kind].classes else None
    shards, tests = {site: np.arange(len(train))}, {site: np.arange(len(test))}
    if job.data.test is None:
        share = job.clients.test
        tests = own_tests(share, shards, Streams(job.train.seed)) if share else {}
        shards = {site: np.setdiff1d(shards[site], tests.get(site, []))}
    return Prepared(train, test, shards, tests, labels, None, lacking)


def prepare_test(job: Job, base_dir: Path | None) -> Prepared:
    """What the server of sites has: test rows, if the job names some, and the names of the classes.

    The names are the job's; else those of its rows here, for which alone its training rows are read.

    Raises:
        UserError: a file or column is not usable, or the job has classes and does not name them.
    """
    empty = no_rows(wanted_columns(job))
    test = empty if job.data.test is None else read_rows(job, job.data.test, wanted_columns(job), base_dir)
    if not TASK_KINDS[job.task.kind].classes:
        return Prepared(empty, test, {}, None, None, None, test.lacking)
    named = job.task.labels is not None
    train = empty if named or not job.data.train else read_rows(job, job.data.train, wanted_columns(job), base_dir)
    if not (named or len(train) or len(test)):
        raise UserError("[task] labels: is missing; between sites the job names the classes, as in ['no', 'yes']")
    labels = class_names(job, train, test) if len(train) or len(test) else tuple(job.task.labels or ())
    return Prepared(empty, test, {}, None, labels, None, test.lacking)


def training_texts(job: Job, data: Prepared) -> Iterator[str]:
    """The texts of all clients' training rows, in the order of the rows."""
    blank = " " if TASK_KINDS[job.task.kind].words else WORD_END
    for row in sorted(int(row) for rows in data.shards.values() for row in rows):
        for name in text_columns(job):
            yield data.train.columns[name][row].replace(WORD_END, blank)


def own_tests(share: float, shards: Mapping[str, Index], streams: Streams) -> dict[str, Index]:
    """Client -> the rows of its own that it tests on: ``share`` of them, at least one, drawn at random.

    Raises:
        UserError: a client would have nothing left to train on.
    """
    tests = {}
    for client, rows in shards.items():
        count = max(1, round(share * len(rows)))
        if count >= len(rows):
            raise UserError(
                f"[clients] test: {client} has {plural(len(rows), 'row')}, too few to train and to test on"
            )
        tests[client] = np.sort(streams.numpy(-1, client, OWN_TEST).permutation(rows)[:count])
    return tests


def tested(kind: str, tests: Mapping[str, Index]) -> dict[str, dict[str, Index]]:
    """Who scores on whose test rows: ``each`` client on its own, one that stands for all on everybody's."""
    if kind == "each":
        return {client: {client: rows} for client, rows in tests.items()}
    return {"all" if kind == "pooled" and len(tests) > 1 else next(iter(tests)): dict(tests)}


def population(kind: str, shards: Mapping[str, Index]) -> dict[str, Index]:
    """The shards that a method trains on: of ``each`` client, all ``pooled`` into one, or the first ``one``."""
    if kind == "each" or len(shards) == 1:
        return dict(shards)
    if kind == "pooled":
        return {"all": np.sort(np.concatenate(list(shards.values())))}
    first = next(iter(shards))
    return {first: shards[first]}
