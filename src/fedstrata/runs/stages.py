"""A job from its file to its output folder, stage by stage."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedstrata.client.setup import (
    check_plans,
    head_of,
    init_seed,
    make_ready,
    model_path,
    resolve_auto,
    write_outline,
)
from fedstrata.data.prepare import Prepared, prepare, prepare_test
from fedstrata.errors import UserError
from fedstrata.events import StageEnded
from fedstrata.job.file import Overrides, load
from fedstrata.job.tables import Job
from fedstrata.models import checkpoints, scratch
from fedstrata.runs.folder import check_output_dir, same_job, status_on_disk
from fedstrata.runs.notes import check_permission
from fedstrata.runs.result import Result, combine_stages, read_result, read_status
from fedstrata.runs.train import Stage, Tell, train_stage
from fedstrata.server import state
from fedstrata.sites.federation import Federation, check_sites, federation, names_of, settle_sites

START = "start"
"""Folder of a new model in the output folder of the stage that begins with it."""


def run_job(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    resume: bool = False,
    progress: Tell | None = None,
) -> Result:
    """See :func:`fedstrata.run`."""
    jobs = [settle_sites(resolve_auto(job)) for job in load(source, overrides)]
    if len({job.between_sites for job in jobs}) > 1:
        raise UserError("[engine] name: must be the same in all stages")
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else None
    folder = Path(jobs[0].output.dir)
    check_output_dir(folder, resume)
    for job in jobs:
        if not job.between_sites:
            check_permission(job)
    tell = progress or (lambda event: None)
    data = [prepare_test(job, base_dir) if job.between_sites else prepare(job, base_dir) for job in jobs]
    places = [folder / "stages" / job.stage if len(jobs) > 1 else folder for job in jobs]
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as made:
        starts = [
            _start(job, rows, place, base_dir, Path(made) / (job.stage or "start")) if job.model else None
            for job, rows, place in zip(jobs, data, places, strict=True)
        ]
        first: dict[str, str] = {}
        for job, rows, start in zip(jobs, data, starts, strict=True):
            first[job.stage] = start or first[job.start]
            parts = checkpoints.parts_of(first[job.stage], job.task.kind, rows.labels, head_of(job))
            if job.between_sites:
                check_sites(job, parts)
            check_plans(job, parts, names_of(job) if job.between_sites else rows.shards)
        with federation(jobs[0].engine) if jobs[0].between_sites else nullcontext() as far:
            for job, rows, start, place in zip(jobs, data, starts, places, strict=True):
                begin = start or str(results[job.start].model)
                results[job.stage] = run_stage(job, rows, begin, place, tell, far)
    return combine_stages(list(results.values()), folder) if len(jobs) > 1 else results[job.stage]


def _start(job: Job, data: Prepared, place: Path, base_dir: Path | None, made: Path) -> str:
    """Folder or hub id of a job's model; a new one is what an earlier call left, else an outline in ``made``."""
    assert job.model is not None
    if job.model.config is None:
        return model_path(job, base_dir)
    return str(place / START) if (place / START).exists() else write_outline(job, data, base_dir, made)


def run_stage(
    job: Job, data: Prepared, start: str, folder: Path, tell: Tell, far: Federation | None = None
) -> Result:
    """Run one stage, or go on with it, or return what it came to if it is finished.

    Args:
        job: the stage's job, settled.
        data: its rows.
        start: folder or hub id of the model to start from; of a new model also its outline, which becomes one.
        folder: the stage's output folder.
        tell: receives events.
        far: the sites; None where the clients are in this process.

    Raises:
        UserError: the model does not fit, the folder's run began with another job, or a client's training failed.
    """
    reused = read_status(folder) == "finished"
    if reused:
        same_job(job, folder)
    else:
        new = job.model is not None and job.model.config is not None and Path(start) != folder / START
        if new:
            scratch.add_weights(Path(start), job.task.kind, data.labels, head_of(job), init_seed(job))
        ready = make_ready(job, data, start)
        same_job(job, folder)
        if new:
            scratch.publish(Path(start), folder / START)
        with status_on_disk(job, folder):
            train_stage(Stage(job, data, ready, folder, tell, far))
        state.prune(folder, job.train.keep_feature_cache)
    tell(StageEnded(job.stage, reused))
    return read_result(folder)
