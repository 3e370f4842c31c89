"""What a job asks of its model beyond its name: a head and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstrata.errors import UserError
from fedstrata.job.head_table import Head, misfit
from fedstrata.job.tables import Job, method_name
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.heads import KEY, HeadConfig
from fedstrata.plan.parts import Parts
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


def check_branches(job: Job, parts: Parts, plan: Plan) -> None:
    """Refuse a head over four layers where a client builds fewer.

    Raises:
        UserError: a client builds fewer layers than the head takes.
    """
    wanted = len(parts.head_layers)
    if len(plan.layers) < wanted and not plan.server:
        whose = f"[head] kind: {job.head.kind!r}" if job.head.kind else "the start model's head"
        raise UserError(
            f"{whose} takes the last {wanted} layers, and with [method] name = "
            f"{method_name(job.method)!r}, as set here, a client builds {len(plan.layers)}"
        )


def head_of(job: Job) -> HeadConfig | None:
    """The head the job asks for; None where it leaves that to the checkpoint."""
    if job.head.left:
        return HeadConfig(kind="")
    made = job.head.model_dump()
    return HeadConfig(**made) if job.head.kind else None


def check_head(job: Job, config: Any) -> None:
    """Refuse a head that the job did not name, and that the rest of it does not go with.

    Args:
        job: the job.
        config: of its model, with the head that the checkpoint or the stage before had, if that goes on.

    Raises:
        UserError: it does not go with the rest.
    """
    if not (found := getattr(config, KEY, None)):
        return
    head = HeadConfig(**found)
    if why := misfit(head.average, head.tokens, job.task.kind, job.train.padding):
        raise UserError(f"{why}; the head is that of the start model")


def with_heads(jobs: Sequence[Job]) -> list[Job]:
    """A job's stages, those that go on with the head of the stage that they start from with its name.

    Of its saved model they take it anyway; so it is known before there is one. So is that it has none.
    """
    made: dict[str, Job] = {}
    for job in jobs:
        head = job.head
        if not TASK_KINDS[job.task.kind].heads:
            head = Head.left_behind()
        elif head.kind is None and job.start in made:
            head = made[job.start].head
        made[job.stage] = job.model_copy(update={"head": head})
    return list(made.values())
