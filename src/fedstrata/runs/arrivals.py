"""Asynchronous rounds of a stage in one process: the order of arrival, and the engine that keeps to it."""

from __future__ import annotations

from collections.abc import Mapping
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
    cohort = Cohort(list(examples), job.clients.fraction, job.engine.buffer, Streams(job.train.seed))
    if job.engine.arrivals is not None:
        return recorded_arrivals(Path(job.engine.arrivals), cohort, job.method.rounds)
    return list(islice(drawn_arrivals(cohort, examples), job.method.rounds))


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
