"""Asynchronous rounds of a stage in one process: the order of arrival, and the engine that keeps to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from fedstrata.engines.arriving import ArrivingEngine, StoredAnswers
from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.plan.arrivals import Arrival, Cohort, drawn_arrivals, recorded_arrivals
from fedstrata.plan.messages import Engine
from fedstrata.plan.streams import Streams
from fedstrata.server.records import Records
from fedstrata.wire.store import Store


def arrivals_of(job: Job, examples: Mapping[str, int]) -> list[list[Arrival]]:
    """The arrivals of each round of a job's clients here; none where all are waited for.

    Args:
        job: the stage's job.
        examples: client -> number of its examples, in canonical order.

    Raises:
        UserError: the recorded ones cannot be those of this job.
    """
    if job.engine.buffer is None:
        return []
    if job.engine.arrivals is not None:
        return check_arrivals(job, list(examples))
    return list(islice(drawn_arrivals(_cohort(job, list(examples)), examples), job.method.rounds))


def check_arrivals(job: Job, names: Sequence[str]) -> list[list[Arrival]]:
    """The recorded arrivals of each round that a job names; none where it names none.

    Args:
        job: the stage's job.
        names: the clients, in canonical order.

    Raises:
        UserError: they cannot be those of this job.
    """
    if job.engine.arrivals is None:
        return []
    return recorded_arrivals(Path(job.engine.arrivals), _cohort(job, names), job.method.rounds)


def _cohort(job: Job, names: Sequence[str]) -> Cohort:
    assert job.engine.buffer is not None
    return Cohort(names, job.clients.fraction, job.engine.buffer, Streams(job.train.seed))


def arriving(
    job: Job, engine: Engine, examples: Mapping[str, int], clients: Store, records: Records, done: int
) -> Engine:
    """The engine of a stage's rounds: between sites, and where all are waited for, the engine itself.

    Args:
        job: the stage's job.
        engine: plays the clients.
        examples: client -> number of its examples.
        clients: the clients' disks.
        records: the run's.
        done: rounds that have been played.

    Raises:
        UserError: the order is not the one in which the run began.
    """
    if job.engine.buffer is None or job.between_sites:
        return engine
    order = arrivals_of(job, examples)
    if records.lines("arrivals") != [arrival.record() for arrival in chain(*order[:done])]:
        raise UserError("[engine] arrivals: is not the order of arrival in which this run began")
    return ArrivingEngine(engine, order, StoredAnswers({name: clients.below(name) for name in examples}))
