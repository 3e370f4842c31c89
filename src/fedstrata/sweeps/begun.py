"""Cells that have begun, compared with jobs, rows and models before any is run: no table mixes two experiments.

A cell is resumed with the job it began with, but for keys that no number depends on and for more rounds, which
are the rounds of a longer run. Learning rates, which a single run may lower on the way, stay what they were.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.client.model_options import head_of
from fedstrata.client.setup import init_seed, make_ready, resolve_jobs
from fedstrata.client.start_model import model_path, write_outline
from fedstrata.data.fingerprint import Fingerprints, fingerprints
from fedstrata.data.prepare import Prepared, divided, read_sources
from fedstrata.errors import UserError, naming
from fedstrata.job.tables import Job
from fedstrata.models import scratch
from fedstrata.models.quiet import quiet
from fedstrata.runs.begun import as_it_began, check_begun, check_kept, places_of
from fedstrata.runs.components import Components
from fedstrata.runs.result import read_status, stages_of
from fedstrata.runs.resume import Change, check_rows, differences, job_missing, same_vocabulary
from fedstrata.runs.start import start_digest, start_weights
from fedstrata.server.state import manifests, newest_commit
from fedstrata.sweeps.cells import Cell

ANEW = "a sweep's cells go on with the jobs they began with; delete this folder to run the cell anew"


@dataclass(frozen=True)
class _Begun:
    """A stage of a cell that has rounds on disk."""

    cell: Cell
    job: Job
    place: Path


def check_cells(cells: Sequence[Cell], base_dir: Path | None) -> list[Cell]:
    """Compare cells that have begun with their jobs, rows and, while a cell is to be run, start models.

    Args:
        cells: the sweep's cells.
        base_dir: folder in which relative paths are looked up after the working directory.

    Returns:
        Those that are over: finished, and not to get more rounds.

    Raises:
        UserError: a cell differs, or what tells so is damaged or missing.
    """
    found = [(cell, _checked(cell, base_dir)) for cell in cells if cell.folder.exists()]
    over = [cell for cell, stages in found if _ended(cell) and all(map(_over, stages))]
    _check_rows([stage for _, stages in found for stage in stages], base_dir, with_models=len(over) < len(cells))
    return over


def _checked(cell: Cell, base_dir: Path | None) -> list[_Begun]:
    """The stages of a cell that have rounds on disk, all of one that has ended; their jobs are compared."""
    places = places_of(cell.jobs)
    with naming(f"cell {str(cell)!r}"):
        if _ended(cell) and stages_of(cell.folder) != [job.stage for job in cell.jobs]:
            raise UserError(f"{cell.folder}: its run had other stages; {ANEW}")
        begun = [_ended(cell) or (place / "job.toml").exists() or bool(manifests(place)) for place in places]
        if not any(begun):
            return []
        jobs = [as_it_began(job, place) for job, place in zip(cell.jobs, places, strict=True)]
        jobs = resolve_jobs(jobs, base_dir)
        stages = [_Begun(cell, job, place) for job, place in zip(jobs, places, strict=True)]
        by_name = {stage.job.stage: stage for stage in stages}
        for stage in (stage for stage, there in zip(stages, begun, strict=True) if there):
            _check_job(stage)
            _check_more_rounds(stage, None if stage.job.model else by_name[stage.job.start])
        check_begun(jobs, places, Components())
    return [stage for stage in stages if _ended(cell) or manifests(stage.place)]


def _check_job(stage: _Begun) -> None:
    if not (stage.place / "job.toml").exists():
        raise job_missing(stage.place / "job.toml")
    if wrong := next((change for change in differences(stage.job, stage.place) if not _allowed(change)), None):
        raise UserError(f"{stage.place}: {wrong}; {ANEW}")


def _check_more_rounds(stage: _Begun, start: _Begun | None) -> None:
    """Refuse more rounds of a stage that has not kept what they take.

    Args:
        stage: the stage.
        start: the one whose model it began with; None for one with a model of its own.

    Raises:
        UserError: its state or that model is gone.
    """
    if _over(stage):
        return
    check_kept(stage.place, newest_commit(stage.place) or {})
    gone = start and not any((start.place / kind).exists() for kind in ("model", "shared"))
    if gone and _ended(stage.cell):
        raise UserError(
            f"{stage.place}: method.rounds: cannot be {stage.job.method.rounds}, as the model of stage "
            f"{stage.job.start!r}, from which it began, is gone; [sweep] keep_models = true keeps it"
        )


def _check_rows(stages: Sequence[_Begun], base_dir: Path | None, with_models: bool) -> None:
    """Compare the rows; each source is read once, and divided once for each seed and way to divide it.

    Of each model the first stage that began from it is compared.
    """
    models: set[str] = set()
    by_source: dict[str, list[_Begun]] = defaultdict(list)
    for stage in stages:
        by_source[_source(stage.job)].append(stage)
    for alike in by_source.values():
        with naming(f"cell {str(alike[0].cell)!r}"):
            train, test = read_sources(alike[0].job, base_dir)
        known: dict[str, Fingerprints] = {}
        for stage in alike:
            key = _key(stage.job.clients.model_dump(), stage.job.data.holdout, stage.job.train.seed)
            with naming(f"cell {str(stage.cell)!r}"):
                rows = None if key in known else divided(stage.job, train, test)
                if rows is not None:
                    known[key] = fingerprints(rows)
                check_rows(stage.place, known[key])
                model = _given(stage.job) if with_models else None
                if model is not None and model not in models:
                    models.add(model)
                    _check_model(stage, rows or divided(stage.job, train, test), base_dir)


def _given(job: Job) -> str | None:
    """All that is read for a stage's start model; None where it is another stage's, or made of job and rows."""
    model, listed = job.model, job.privacy.public_vocabulary
    if model is None or (model.name is None and model.tokenizer is None and listed is None):
        return None
    return _key(model.model_dump(), listed)


@quiet()
def _check_model(stage: _Begun, data: Prepared, base_dir: Path | None) -> None:
    with tempfile.TemporaryDirectory() as outline:
        ready = make_ready(stage.job, data, _start(stage.job, data, base_dir, Path(outline)))
    same_vocabulary(stage.place, ready.loaded.parts.sharing.listed)
    commit = newest_commit(stage.place) or {}
    if commit.get("start") != start_digest(start_weights(ready.runtime), ready.loaded):
        raise UserError(f"{stage.place}: its run began from other weights, or another config or tokenizer; {ANEW}")


def _start(job: Job, data: Prepared, base_dir: Path | None, outline: Path) -> str:
    """Folder or hub id of a job's model; a new one is drawn in an empty folder, as its run has drawn it."""
    assert job.model is not None
    if job.model.config is None:
        return model_path(job, base_dir)
    write_outline(job, data, base_dir, outline)
    scratch.add_weights(outline, job.task.kind, data.labels, head_of(job), init_seed(job))
    return str(outline)


def _source(job: Job) -> str:
    """All that decides which rows are read."""
    data, clients = job.data, job.clients
    asked = "label" in data.model_fields_set
    return _key(data.model_dump(), asked, job.task.kind, job.task.labels, clients.column, clients.partition)


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True, default=str)


def _allowed(change: Change) -> bool:
    if change.key == "method.rounds":
        return isinstance(change.was, int) and change.now > change.was
    return change.key == "output.client_models"


def _over(stage: _Begun) -> bool:
    """Whether a stage has ended, and its job asks for no more rounds."""
    commit: Mapping[str, Any] = newest_commit(stage.place) or {}
    return "finished" in commit and commit["done"] >= stage.job.method.rounds


def _ended(cell: Cell) -> bool:
    return read_status(cell.folder) == "finished"
