"""The stages of a job, one after the other, each from its start model to its result."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from fedstrata.client.setup import (
    check_plans,
    head_of,
    init_seed,
    make_ready,
    model_path,
    resolve_auto,
    write_outline,
)
from fedstrata.data.prepare import Prepared, population
from fedstrata.events import StageEnded
from fedstrata.job.tables import Job
from fedstrata.models import checkpoints, scratch
from fedstrata.models.quiet import quiet
from fedstrata.plan.parts import Parts
from fedstrata.runs.components import Components
from fedstrata.runs.folder import same_job, status_on_disk
from fedstrata.runs.models import check_start, save_client_models
from fedstrata.runs.notes import check_names, check_permission
from fedstrata.runs.result import Result, combine_stages, read_result, read_status, write_result
from fedstrata.runs.train import ReadyStage, Stage, Tell, train_stage
from fedstrata.server import state
from fedstrata.sites.federation import check_sites, federation, names_of, settle_sites

START = "start"
"""Folder of a new model in the output folder of the stage that begins with it."""


@quiet()
def run_stages(
    jobs: Sequence[Job], data: Sequence[Prepared], base_dir: Path | None, tell: Tell, components: Components
) -> Result:
    """Run every stage of a job, or go on with them, in the folder that the first one names.

    Args:
        jobs: the stages' jobs.
        data: their rows.
        base_dir: folder in which relative paths are looked up after the working directory.
        tell: receives events.
        components: objects of the caller's own.
    """
    jobs = [settle_sites(resolve_auto(job)) for job in jobs]
    for job in jobs:
        check_names(job)
        if not job.between_sites:
            check_permission(job)
    folder = Path(jobs[0].output.dir)
    places = [folder / "stages" / job.stage if len(jobs) > 1 else folder for job in jobs]
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as outlines:
        starts = [
            _start(job, rows, place, base_dir, Path(outlines) / (job.stage or "start")) if job.model else None
            for job, rows, place in zip(jobs, data, places, strict=True)
        ]
        _check_stages(jobs, data, starts, tell)
        connected = federation(jobs[0].engine) if jobs[0].between_sites else nullcontext()
        with connected as sites:
            for job, rows, start, place in zip(jobs, data, starts, places, strict=True):
                begin = start or str(results[job.start].start)
                stage = Stage(job=job, data=rows, folder=place, tell=tell, components=components, federation=sites)
                results[job.stage] = run_stage(stage, begin)
    return combine_stages(list(results.values()), folder) if len(jobs) > 1 else results[jobs[0].stage]


def _start(job: Job, data: Prepared, place: Path, base_dir: Path | None, outline: Path) -> str:
    """Folder or hub id of a job's model; a new one is what an earlier call left, else its outline."""
    assert job.model is not None
    if job.model.config is None:
        return model_path(job, base_dir)
    return str(place / START) if (place / START).exists() else write_outline(job, data, base_dir, outline)


def _check_stages(jobs: Sequence[Job], data: Sequence[Prepared], starts: Sequence[str | None], tell: Tell) -> None:
    """Make every plan of every stage once, before anything is trained."""
    first: dict[str, str] = {}
    made: dict[str, tuple[Job, Parts, list[str]]] = {}
    for job, rows, start in zip(jobs, data, starts, strict=True):
        first[job.stage] = start or first[job.start]
        parts = checkpoints.parts_of(first[job.stage], job.task.kind, rows.labels, head_of(job))
        if job.between_sites:
            check_sites(job, parts)
        check_plans(job, parts, names_of(job) if job.between_sites else rows.shards, tell)
        asked = names_of(job) if job.between_sites else list(population(job.method.population, rows.shards))
        made[job.stage] = job, parts, asked
        if start is None:
            check_start(job, parts, *made[job.start])


def run_stage(stage: Stage, start: str) -> Result:
    """Run one stage, or go on with it, or return its result if it is finished.

    Args:
        stage: the stage.
        start: folder or hub id of the model to start from; for a model from a config, the folder with its config
            and tokenizer, into which weights are written.

    Raises:
        UserError: the model does not fit, the folder's run began with another job, or a client's training failed.
    """
    job, folder, own = stage.job, stage.folder, stage.components
    reused = read_status(folder) == "finished"
    if reused:
        same_job(job, folder, own.identities())
        if job.output.client_models is not False and (folder / "shared").exists():
            save_client_models(folder, read_result(folder).clients)
            write_result(job, folder, "finished", None)
    else:
        new = job.model is not None and job.model.config is not None and Path(start) != folder / START
        if new:
            scratch.add_weights(Path(start), job.task.kind, stage.data.labels, head_of(job), init_seed(job))
        ready = make_ready(job, stage.data, start, task=own.task, codec=own.codec)
        same_job(job, folder, own.identities())
        if new:
            scratch.publish(Path(start), folder / START)
        with status_on_disk(job, folder):
            train_stage(ReadyStage(**vars(stage), ready=ready))
        state.prune(folder, job.train.keep_feature_cache)
    stage.tell(StageEnded(job.stage, reused))
    return read_result(folder)
