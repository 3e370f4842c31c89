"""What a run of several stages has settled by itself for those that have not begun: ``choices.toml``.

A stage that has begun has it in its ``job.toml``. A run that goes on settles nothing again, on whatever machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.job.tables import Job
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import CHOICES, FORMAT
from fedstrata.runs.folder import check_format
from fedstrata.runs.resume import as_recorded
from fedstrata.wire.files import write_bytes

KEYS = {"train": ("device", "precision"), "engine": ("threads",)}
"""What bits depend on and a job may leave open."""


def keep_choices(jobs: Sequence[Job], folder: Path) -> None:
    """Write what is settled, unless it is there already; nothing is written for a single stage.

    Args:
        jobs: the stages' jobs, every "auto" resolved.
        folder: the run's output folder.
    """
    if len(jobs) > 1 and not (folder / CHOICES).exists():
        stages = {job.stage: {table: _settled(job, table) for table in KEYS} for job in jobs}
        write_bytes(folder / CHOICES, tomli_w.dumps({"format": FORMAT, "stages": stages}).encode())


def with_choices(jobs: Sequence[Job], places: Sequence[Path], folder: Path) -> list[Job]:
    """The jobs, what they leave open as it was settled when the run began.

    Args:
        jobs: the stages' jobs.
        places: their output folders.
        folder: the run's output folder.

    Raises:
        UserError: a file of the folder is damaged, or was written in another format.
    """
    kept: dict[str, Any] = {}
    if len(jobs) > 1 and (folder / CHOICES).exists():
        kept = read_toml(folder / CHOICES)
        check_format(folder, kept.pop("format", None))
    made = []
    for job, place in zip(jobs, places, strict=True):
        begun = (place / "job.toml").exists()
        own = {} if begun else kept.get("stages", {}).get(job.stage, {})
        made.append(_filled(as_recorded(job, place), own))
    return made


def _settled(job: Job, table: str) -> dict[str, Any]:
    found = {key: getattr(getattr(job, table), key) for key in KEYS[table]}
    return {key: value for key, value in found.items() if value != "auto"}


def _filled(job: Job, own: dict[str, dict[str, Any]]) -> Job:
    for table, values in own.items():
        before = getattr(job, table)
        auto = {key: value for key, value in values.items() if getattr(before, key) == "auto"}
        job = job.model_copy(update={table: before.model_copy(update=auto)})
    return job
