"""What a job asks of its model beyond its name: a head and adapters."""

from __future__ import annotations

from fedstrata.job.tables import Job
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.heads import HeadConfig


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


def head_of(job: Job) -> HeadConfig | None:
    """The head the job asks for; None where it leaves that to the checkpoint."""
    made = job.head.model_dump()
    return HeadConfig(**made) if job.head.kind else None
