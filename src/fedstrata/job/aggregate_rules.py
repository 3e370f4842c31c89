"""Aggregates by name: what each needs, and what they do not go with. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fedstrata.errors import UserError, plural
from fedstrata.job.tables import Job, method_name
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import Streams

ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "centered_clip")
"""Aggregates that bear bad replies, see :mod:`fedstrata.server.robust`."""
USERS = {
    "malicious": ("trimmed_mean", "krum", "multi_krum"),
    "clip_radius": ("centered_clip",),
    "clip_steps": ("centered_clip",),
}
"""Key of ``[server]`` -> the aggregates that it is a setting of."""
ROUNDS = 100
"""Rounds whose senders are counted before a run."""


def least_senders(aggregate: str, malicious: int) -> int:
    """Clients that must have sent a part for it to be merged.

    One bad client of two decides about a median; f of 2 f about a trimmed mean; krum bears f of 2 f + 3 (Blanchard
    et al. 2017, proposition 4.2).
    """
    if aggregate == "trimmed_mean":
        return 2 * malicious + 1
    if aggregate in ("krum", "multi_krum"):
        return 2 * malicious + 3
    return 3 if aggregate in ROBUST else 1


def job_least_senders(job: Job) -> int:
    """As :func:`least_senders`, of a job."""
    return least_senders(job.server.aggregate, job.server.malicious or 1)


def check_aggregate(job: Job) -> None:
    """Refuse a robust aggregate, or clipping, that the rest of the job makes impossible.

    Raises:
        UserError: it does.
    """
    table, method = job.server, method_name(job.method)
    for key, users in USERS.items():
        if getattr(table, key) is not None and table.aggregate not in users:
            raise UserError(
                f"[server] {key}: goes with aggregate = {' or '.join(map(repr, users))}, "
                f"not with {table.aggregate!r}"
            )
    what = "[server] max_norm" if table.max_norm is not None else ""
    if table.aggregate in ROBUST:
        what = f"[server] aggregate = {table.aggregate!r}"
    if not what:
        return
    if job.method.exchange != "weights":
        raise UserError(
            f"{what}: goes with methods whose clients send weights, not with {method!r} as set here, which sends "
            f"{job.method.exchange}: what they do at the server is no reply that could be left out"
        )
    if job.method.population != "each" or job.method.client_schedule != "parallel":
        raise UserError(
            f"{what}: compares what several clients send of one model; with {method!r} one client at a time trains"
        )
    if job.adapter.kind == "lora" and job.adapter.merge == "exact":
        raise UserError(
            f"{what}: does not go with [adapter] merge = 'exact', which takes the average of the clients' "
            "products as it is; expected 'alternate' or 'freeze_a'"
        )


def check_senders(job: Job, parts: Parts, clients: Sequence[str]) -> None:
    """Refuse a robust aggregate of parts that too few clients send.

    Args:
        job: the stage's job.
        parts: the model's.
        clients: the clients' names, in canonical order.

    Raises:
        UserError: in one of the first rounds there is such a part.
    """
    least, streams = job_least_senders(job), Streams(job.train.seed)
    if least == 1:
        return
    for round in range(min(ROUNDS, job.method.rounds)):
        sampled = sample_clients(clients, job.clients.fraction, round, streams)
        part, count = _fewest(
            make_plan(job.method, parts, job.task.kind, round, client, streams).send for client in sampled
        )
        if count < least:
            name = job.server.aggregate
            bearing = f" with malicious = {job.server.malicious or 1}" if name in USERS["malicious"] else ""
            raise UserError(
                f"[server] aggregate: {name!r}{bearing} needs {least} clients that send a part, but {part} "
                f"is sent by {plural(count, 'client')} in round {round + 1}; expected more clients, or "
                "aggregate = 'mean'"
            )


def _fewest(sent: Iterable[Sequence[str]]) -> tuple[str, int]:
    """The part that the fewest clients send, and how many do; of no part nobody is one too few."""
    counts = Counter(part for own in sent for part in own)
    return min(counts.items(), key=lambda item: (item[1], item[0]), default=("nothing", 0))
