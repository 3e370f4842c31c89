"""What asynchronous rounds do not go with: whatever needs all answers of a round, or answers to one model."""

from __future__ import annotations

from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.job.paths import existing_file
from fedstrata.job.tables import Job, method_name
from fedstrata.plan.plan import Plan

WHERE = "[engine] buffer:"


def check_buffer(job: Job) -> None:
    """Refuse asynchronous rounds where late answers could not be merged.

    Raises:
        UserError: they could not.
    """
    if job.engine.buffer is None:
        return
    _check_method(job)
    if job.server.aggregate != "mean":
        raise UserError(
            f"{WHERE} does not go with [server] aggregate = {job.server.aggregate!r}, which compares changes of "
            "one model, while late answers are changes of earlier ones; expected 'mean', which goes with max_norm"
        )
    if job.privacy.sum_only:
        raise UserError(
            f"{WHERE} does not go with [privacy] sum_only, whose sums are opened once all clients of a round have "
            "answered; expected sum_only = false"
        )
    if job.privacy.level != "none":
        raise UserError(
            f"{WHERE} does not go with [privacy] level = {job.privacy.level!r}, whose epsilon counts the rounds "
            "that clients are sampled for, not when their messages are merged; expected 'none'"
        )
    if job.wire.part_period > 1:
        raise UserError(
            f"{WHERE} does not go with [wire] part_period, where every part is merged in the round of its turn; "
            "expected: 1"
        )
    if job.adapter.kind == "lora" and job.adapter.merge == "exact":
        raise UserError(
            f"{WHERE} does not go with [adapter] merge = 'exact', which averages products of one model; expected "
            "'alternate', 'freeze_a' or 'plain'"
        )
    if job.clients.test is not None:
        raise UserError(
            f"{WHERE} does not go with [clients] test, by which every client scores each round's model, as one "
            "that is busy cannot; expected [data] test"
        )


def _check_method(job: Job) -> None:
    method, name = job.method, method_name(job.method)
    if method.exchange != "weights":
        raise UserError(
            f"{WHERE} goes with methods that send weights, not with {name!r} as set here, which sends "
            f"{method.exchange}"
        )
    if method.population != "each":
        raise UserError(f"{WHERE} goes with methods whose clients send parts of the model, not with {name!r}")
    if method.client_schedule != "parallel":
        raise UserError(
            f"{WHERE} does not go with {name!r} as set here, where each client continues from the one before it"
        )


def check_no_own_parts(job: Job, plan: Plan) -> None:
    """Refuse asynchronous rounds of clients that keep parts.

    Raises:
        UserError: the plan keeps some.
    """
    if job.engine.buffer is not None and plan.keep:
        raise UserError(
            f"{WHERE} does not go with {method_name(job.method)!r} as set here, whose clients keep parts of their "
            "own: each scores its model after every round, as one that is busy cannot"
        )


def with_arrivals(job: Job, base_dir: Path | None) -> Job:
    """The job with the path of its recorded arrivals made absolute.

    Args:
        job: the job.
        base_dir: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: there is no such file.
    """
    if job.engine.arrivals is None:
        return job
    path = existing_file("[engine] arrivals", job.engine.arrivals, base_dir)
    return job.model_copy(update={"engine": job.engine.model_copy(update={"arrivals": path})})
