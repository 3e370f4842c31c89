"""What a job asks of its model beyond its name: a head and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.heads import BRANCHES, HeadConfig
from fedstrata.plan.plan import Plan


def adapter_of(job: Job) -> AdapterConfig | None:
    """The adapters the job asks for; None where it has none."""
    table = job.adapter
    if table.kind == "none":
        return None
    ranks = table.rank if isinstance(table.rank, dict) else {"default": table.rank}
    ranks = {"default": max(ranks.values()), **ranks}
    return AdapterConfig(
        ranks=tuple(sorted(ranks.items())),
        alpha=table.alpha,
        targets=None if table.targets is None else tuple(table.targets),
        dropout=table.dropout if job.train.dropout else 0.0,
        init=table.init,
        merge=table.merge,
    )


def check_branches(job: Job, plan: Plan) -> None:
    """Refuse a head over four layers where a client builds fewer.

    Raises:
        UserError: so it is.
    """
    wanted = BRANCHES[job.head.kind] if job.head.kind else 1
    if len(plan.layers) < wanted and not plan.server and wanted > 1:
        raise UserError(
            f"[head] kind: {job.head.kind!r} takes the last {wanted} layers, and with [method] name = "
            f"{method_name(job.method)!r}, as set here, a client builds {len(plan.layers)}"
        )


def head_of(job: Job) -> HeadConfig | None:
    """The head the job asks for; None where it leaves that to the checkpoint."""
    made = job.head.model_dump()
    return HeadConfig(**made) if job.head.kind else None


def with_heads(jobs: Sequence[Job]) -> list[Job]:
    """A job's stages, those that go on with the head of the stage that they start from with its name.

    Of its saved model they take it anyway; so it is known before there is one.
    """
    made: dict[str, Job] = {}
    for job in jobs:
        before = made[job.start].head if job.start in made else job.head
        goes_on = job.head.kind is None and TASK_KINDS[job.task.kind].heads
        made[job.stage] = job.model_copy(update={"head": before}) if goes_on else job
    return list(made.values())
