"""What a job's rows are, before anything is trained: how many, of which classes, known test rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from fedstrata.data.prepare import Prepared, population
from fedstrata.data.read import WORD_END, Rows
from fedstrata.data.rows import text_columns
from fedstrata.errors import plural
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index

FEW = 8
"""Clients and classes up to this number are listed one by one."""


def row_facts(job: Job, data: Prepared) -> dict[str, Any]:
    """Rows, classes and overlap of a job's divided rows: the first fields of ``data`` in ``result.json``.

    ``classes`` and ``test_classes`` count rows (for ``tag`` words) of each class, None without classes;
    ``test_rows_in_training`` counts test rows whose text also stands in a training row. Of training rows that are
    at sites nothing is known, and all that rests on them is None.
    """
    train, test = trained_and_tested(job, data)
    texts = set(_texts(job, data.train, train))
    tested = _texts(job, data.test, test)
    classes = None if data.labels is None else (_counts(job, data.train, train), _counts(job, data.test, test))
    return {
        "train_rows": None if job.between_sites else len(train),
        "test_rows": len(test),
        "classes": None if job.between_sites else classes and _in_order(classes[0], data),
        "test_classes": classes and _in_order(classes[1], data),
        "test_rows_in_training": None if job.between_sites else sum(map(texts.__contains__, tested)),
    }


def _in_order(counts: Counter[str], data: Prepared) -> dict[str, int]:
    return {label: counts[label] for label in data.labels or ()}


def holders(job: Job, data: Prepared) -> dict[str, Index]:
    """Who trains on which rows: the clients; with some methods one for all, or the first alone."""
    return population(job.method.population, data.shards) if data.shards else {}


def trained_and_tested(job: Job, data: Prepared) -> tuple[Index, Index]:
    """The rows that are trained on, and those that are tested on; others may be in neither."""
    test = np.arange(len(data.test)) if data.tests is None else _joined(data.tests.values())
    return _joined(holders(job, data).values()), test


def rows_seen_before(jobs: Sequence[Job], data: Sequence[Prepared]) -> dict[str, str]:
    """Stage -> that earlier stages, whose model it starts from, trained on texts of its test rows.

    Stages hold out the same rows of a file only where they read the same ones: one that needs labels leaves out
    rows without, and then holds out others.
    """
    lines, trained = dict[str, str](), dict[str, set[str]]()
    for job, rows in zip(jobs, data, strict=True):
        if job.between_sites:
            return {}
        own, test = trained_and_tested(job, rows)
        before = trained.get(job.start, set())
        if seen := sum(before.issuperset(text) for text in _texts(job, rows.test, test)):
            lines[job.stage] = (
                f"stage {job.stage}: earlier stages train on the text of {seen:,} of its "
                f"{plural(len(test), 'test row')}; [data] test, with rows of its own, keeps them apart"
            )
        if any(later.start == job.stage for later in jobs) and job.method.rounds:
            before = before.union(text for row in _texts(job, rows.train, own) for text in row)
        trained[job.stage] = before
    return lines


def row_lines(facts: Mapping[str, Any], clients: Mapping[str, int]) -> list[str]:
    """The facts in sentences; ``clients`` are each one's rows."""
    lines = []
    if facts["train_rows"]:
        lines.append(f"{plural(facts['train_rows'], 'training row')}: {_by_client(clients)}")
    if facts["test_rows"]:
        lines.append(plural(facts["test_rows"], "test row"))
    if facts["classes"] and facts["train_rows"]:
        lines.append(f"classes in the training rows: {_by_class(facts['classes'])}")
        unseen = [c for c, n in facts["test_classes"].items() if n and not facts["classes"][c]]
        if unseen:
            lines.append(f"no training row is of class {', '.join(unseen[:FEW])}, which stands in test rows alone")
    known, tested = facts["test_rows_in_training"], facts["test_rows"]
    if known and known == tested:
        lines.append("every test row is also a training row: scores say nothing of new texts")
    elif known:
        lines.append(
            f"{known:,} of {plural(tested, 'test row')} also stand in the training rows ({known / tested:.1%})"
        )
    return lines


def _by_client(clients: Mapping[str, int]) -> str:
    if len(clients) <= FEW:
        return ", ".join(f"{client} {rows:,}" for client, rows in clients.items())
    sizes = clients.values()
    return f"{min(sizes):,} to {max(sizes):,} at each of {len(clients):,} clients, median {median(sizes):,.0f}"


def _by_class(classes: Mapping[str, int]) -> str:
    total = sum(classes.values()) or 1
    largest = sorted(classes.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {count / total:.1%}" for name, count in largest[:FEW])
    return listed + (f", and {len(largest) - FEW} more" if len(largest) > FEW else "")


def _joined(indices: Iterable[Index]) -> Index:
    return np.concatenate([np.empty(0, np.int64), *indices]).astype(np.int64)


def _texts(job: Job, rows: Rows, index: Index) -> Iterable[tuple[str, ...]]:
    columns = [rows.columns[name] for name in text_columns(job)]
    return (tuple(column[i].strip() for column in columns) for i in index)


def _counts(job: Job, rows: Rows, index: Index) -> Counter[str]:
    labels = rows.columns[job.data.label]
    if TASK_KINDS[job.task.kind].words:
        return Counter(tag for i in index for tag in labels[i].split(WORD_END))
    return Counter(labels[i] for i in index)
