"""The stages of a job, one after the other, each from its start model to its result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.client.model_options import adapter_of, check_head, head_of
from fedstrata.client.setup import check_plans, init_seed, make_ready, resolve_jobs
from fedstrata.client.sharing import parts_with_sharing
from fedstrata.client.start_model import model_path, write_outline
from fedstrata.data.fingerprint import fingerprints, text_digests
from fedstrata.data.prepare import Prepared, population
from fedstrata.engines.choice import Choice
from fedstrata.engines.processes import Nursery
from fedstrata.errors import UserError
from fedstrata.events import Noted, StageEnded
from fedstrata.job.privacy_rules import check_task
from fedstrata.job.tables import Job
from fedstrata.models import checkpoints, scratch
from fedstrata.models.configs import config_of
from fedstrata.models.fresh_torch import fresh_torch
from fedstrata.models.quiet import quiet
from fedstrata.plan.parts import Parts
from fedstrata.reports.card import write_cards
from fedstrata.runs.arrivals import check_arrivals
from fedstrata.runs.begun import check_begun, check_kept, check_model, left_by, places_of
from fedstrata.runs.choices import keep_choices, with_choices
from fedstrata.runs.components import Components
from fedstrata.runs.engines import choose_engine, threads_set, with_choice, worker_modules
from fedstrata.runs.environment import record_environment
from fedstrata.runs.folder import status_on_disk
from fedstrata.runs.models import check_start, save_client_models
from fedstrata.runs.notes import check_names, check_permission
from fedstrata.runs.privacy import dealt_otherwise, settle_privacy
from fedstrata.runs.result import Result, combine_stages, read_result
from fedstrata.runs.result_file import write_result
from fedstrata.runs.resume import (
    RATES,
    Change,
    changes,
    check_more_rounds,
    record_changes,
    same_job,
    same_rows,
    same_vocabulary,
    without_effect,
)
from fedstrata.runs.start import start_digest, start_weights
from fedstrata.runs.train import ReadyStage, Stage, Tell, train_stage
from fedstrata.server import state
from fedstrata.server.ended import damaged_end, finish
from fedstrata.sites.federation import check_sites, federation, names_of, settle_sites
from fedstrata.sites.run_record import recorded
from fedstrata.wire.files import checksum_of
from fedstrata.wire.finite import not_finite
from fedstrata.wire.on_disk import on_disk

START = "start"
"""Folder of a new model in the output folder of the stage that begins with it."""


@quiet()
@fresh_torch()
def run_stages(
    jobs: Sequence[Job],
    data: Sequence[Prepared],
    base_dir: Path | None,
    tell: Tell,
    components: Components,
    nursery: Nursery,
) -> Result:
    """Run every stage of a job, or go on with them, in the folder that the first one names.

    Args:
        jobs: the stages' jobs.
        data: their rows.
        base_dir: folder in which relative paths are looked up after the working directory.
        tell: receives events.
        components: objects of the caller's own.
        nursery: makes worker processes.
    """
    folder, places = Path(jobs[0].output.dir), places_of(jobs)
    jobs = _settled(with_choices(jobs, places, folder), base_dir, components)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as outlines:
        starts = _starts(jobs, data, places, base_dir, Path(outlines))
        parts = _check_stages(jobs, data, starts, tell)
        choices = _engines(jobs, data, parts, places, components)
        jobs = [with_choice(job, choice) if choice else job for job, choice in zip(jobs, choices, strict=True)]
        jobs = [_calibrated(job, rows) for job, rows in zip(jobs, data, strict=True)]
        check_begun(jobs, places, components)
        connected = federation(jobs[0].engine) if jobs[0].between_sites else nullcontext()
        with connected as sites, recorded(sites.settings.home if sites else None, folder, jobs, tell) as told:
            for job, rows, start, place, choice in zip(jobs, data, starts, places, choices, strict=True):
                begin = start or left_by(results[job.start], job, place)
                stage = Stage(
                    job=job,
                    data=rows,
                    folder=place,
                    tell=told,
                    components=components.of(job),
                    federation=sites,
                    choice=choice,
                    nursery=nursery,
                    noisy=any(one.privacy.level != "none" for one in jobs),
                )
                results[job.stage] = run_stage(stage, begin, lambda: keep_choices(jobs, folder))
    if len(jobs) == 1:
        return results[jobs[0].stage]
    otherwise = dealt_otherwise(jobs, [partial(text_digests, *each) for each in zip(jobs, data, strict=True)])
    whole = combine_stages(list(results.values()), folder, otherwise)
    write_cards(folder, starts[0])
    return whole


def check_stages(
    jobs: Sequence[Job], data: Sequence[Prepared], base_dir: Path | None, outlines: Path, tell: Tell
) -> list[Parts]:
    """Check every stage's job, model and plans, as :func:`run_stages` does before it trains.

    Args:
        jobs: the stages' jobs.
        data: their rows.
        base_dir: folder in which relative paths are looked up after the working directory.
        outlines: an empty folder for configs of new models.
        tell: receives events.

    Returns:
        The parts of each stage's model.

    Raises:
        UserError: what the run would refuse.
    """
    jobs = _settled(jobs, base_dir, Components())
    nowhere = [outlines / "none" for _ in jobs]
    return _check_stages(jobs, data, _starts(jobs, data, nowhere, base_dir, outlines), tell)


def _settled(jobs: Sequence[Job], base_dir: Path | None, components: Components) -> list[Job]:
    """Jobs with every "auto" resolved, checked for what this machine and the clients permit."""
    jobs = [settle_sites(job) for job in resolve_jobs(jobs, base_dir)]
    for job in jobs:
        check_names(job)
        check_task(job, components.task)
        if not job.between_sites:
            check_permission(job)
    return jobs


def _starts(
    jobs: Sequence[Job], data: Sequence[Prepared], places: Sequence[Path], base_dir: Path | None, outlines: Path
) -> list[str | None]:
    """The start model of each stage; None where it is that of an earlier one."""
    return [
        _start(job, rows, place, base_dir, outlines / (job.stage or "start")) if job.model else None
        for job, rows, place in zip(jobs, data, places, strict=True)
    ]


def _engines(
    jobs: Sequence[Job],
    data: Sequence[Prepared],
    parts: Sequence[Parts],
    places: Sequence[Path],
    components: Components,
) -> list[Choice | None]:
    """The engine of each stage whose clients are here."""
    return [
        None if job.between_sites else choose_engine(job, rows, own, place, components)
        for job, rows, own, place in zip(jobs, data, parts, places, strict=True)
    ]


def _calibrated(job: Job, data: Prepared) -> Job:
    """The job with what its noise is calibrated for."""
    return settle_privacy(job, [] if job.between_sites else population(job.method.population, data.shards))


def _start(job: Job, data: Prepared, place: Path, base_dir: Path | None, outline: Path) -> str:
    """Folder or hub id of a job's model; a new one is what an earlier call left, else its outline."""
    assert job.model is not None
    if job.model.config is None:
        return model_path(job, base_dir)
    return str(place / START) if (place / START).exists() else write_outline(job, data, base_dir, outline)


def _check_stages(
    jobs: Sequence[Job], data: Sequence[Prepared], starts: Sequence[str | None], tell: Tell
) -> list[Parts]:
    """Make every plan of every stage once, before anything is trained; the parts of each stage's model."""
    first: dict[str, str] = {}
    made: dict[str, tuple[Job, Parts, list[str]]] = {}
    for job, rows, start in zip(jobs, data, starts, strict=True):
        first[job.stage] = start or first[job.start]
        name = first[job.stage]
        check_head(job, config_of(name, job.task.kind, rows.labels, head_of(job)))
        if start is not None:  # a stage's model that is still to be trained has none yet
            checkpoints.tokenizer_of(name, job.task.kind)
        parts = checkpoints.parts_of(name, job.task.kind, rows.labels, head_of(job), adapter_of(job))
        parts = parts_with_sharing(job, parts, name)
        if job.between_sites:
            check_sites(job, parts)
        check_plans(job, parts, names_of(job) if job.between_sites else rows.shards, tell)
        asked = names_of(job) if job.between_sites else list(population(job.method.population, rows.shards))
        check_arrivals(job, asked)
        made[job.stage] = job, parts, asked
        if start is None:
            check_start(job, parts, *made[job.start])
    return [made[job.stage][1] for job in jobs]


def run_stage(stage: Stage, start: str, keep: Callable[[], None]) -> Result:
    """Run one stage, or go on with it, or return its result if it is finished.

    Args:
        stage: the stage.
        start: folder or hub id of the model to start from; for a model from a config, the folder with its config
            and tokenizer, into which weights are written.
        keep: called before the stage's own job is written.

    Raises:
        UserError: the model does not fit, the folder's run began with another job or other rows, its state is
            damaged, or a client's training failed.
    """
    job, folder, own = stage.job, stage.folder, stage.components
    found = changes(job, folder, own.identities())
    commit = state.newest_commit(folder) or {}
    reused = "finished" in commit and commit["done"] >= job.method.rounds
    if reused:
        _reuse(stage, found, commit)
    else:
        check_kept(folder, commit)
        _go_on(stage, start, found, keep)
    write_cards(folder, start, stage.noisy)
    finish(folder, job.output.keep_state, job.train.keep_feature_cache)
    stage.tell(StageEnded(job.stage, reused))
    return read_result(folder)


def _reuse(stage: Stage, found: list[Change], commit: Mapping[str, Any]) -> None:
    """Check that a finished stage is as it was left; ``result.json`` is made again if it is not."""
    job, folder = stage.job, stage.folder
    if rate := next((change.key for change in found if change.key in RATES), None):
        raise UserError(f"{folder}: {rate}: its run is finished, so nothing is trained at another rate")
    same_rows(folder, fingerprints(stage.data))
    if (wrong := damaged_end(folder)) is not None:
        raise UserError(f"{folder}: its run is finished, but {wrong} is damaged or missing since then")
    for note in filter(None, (check_model(job, folder), without_effect(job, folder))):
        stage.tell(Noted(note))
    record_changes(job, folder, found, commit["done"], stage.components.identities())
    if checksum_of(folder / "result.json") != commit["finished"]:
        stage.tell(Noted(f"{folder / 'result.json'} was damaged or missing; it is made again from the records"))
        write_result(job, folder, "finished", None)
    if (read_result(folder).target or {}).get("score") != job.output.target:
        write_result(job, folder, "finished", None)
    if job.output.client_models is not False and job.adapter.merged_model and (folder / "shared").exists():
        save_client_models(folder, read_result(folder).clients)
        write_result(job, folder, "finished", None)


def _go_on(stage: Stage, start: str, found: list[Change], keep: Callable[[], None]) -> None:
    """Train a stage from its start model, or from where it was."""
    job, folder, own = stage.job, stage.folder, stage.components
    new = job.model is not None and job.model.config is not None and Path(start) != folder / START
    if new:
        scratch.add_weights(Path(start), job.task.kind, stage.data.labels, head_of(job), init_seed(job))
    if stage.nursery and job.engine.name == "pool" and job.engine.address is None:
        stage.nursery.load(worker_modules(job, config_of(start).model_type))  # while this process loads the model
    ready = make_ready(job, stage.data, start, task=own.task, codec=own.codec)
    if rounds := next((change.was for change in found if change.key == "method.rounds"), None):
        check_more_rounds(job, folder, rounds, ready.loaded.parts, ready.shards)
    weights = start_weights(ready.runtime)
    if name := next(filter(None, map(not_finite, weights.values())), None):
        raise UserError(f"model {start}: {name} holds a number that is not finite; nothing can be trained from it")
    keep()
    same_job(job, folder, own.identities())
    same_rows(folder, fingerprints(stage.data))
    same_vocabulary(folder, ready.loaded.parts.sharing.listed)
    if new:
        scratch.publish(Path(start), folder / START)
        ready = replace(ready, loaded=replace(ready.loaded, name=str(folder / START)))  # as its adapters name it
    run = state.RunState(folder, start_digest(weights, ready.loaded))
    done, lost = run.reopen()
    if lost:
        stage.tell(Noted(lost))
    record_changes(job, folder, found, done, own.identities())
    record_environment(folder, job.engine.threads)
    begun = on_disk(weights, folder / "state") if stage.federation else {}
    with status_on_disk(job, folder), threads_set(job.engine.threads), run.committing():
        train_stage(ReadyStage(**vars(stage), ready=ready, weights=weights, start=begun, state=run))
