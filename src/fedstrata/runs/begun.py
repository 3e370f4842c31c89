"""Stages that have begun, compared with their jobs before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.job.toml import read_toml
from fedstrata.runs.components import Components
from fedstrata.runs.engines import recorded_threads
from fedstrata.runs.result import Result
from fedstrata.runs.resume import as_recorded, changes
from fedstrata.server.ended import changed_model
from fedstrata.server.state import manifests


def places_of(jobs: Sequence[Job]) -> list[Path]:
    """The output folder of each stage of a job."""
    folder = Path(jobs[0].output.dir)
    return [folder / "stages" / job.stage if len(jobs) > 1 else folder for job in jobs]


def as_it_began(job: Job, folder: Path) -> Job:
    """The job with what its run settled by itself, as far as the job leaves it open.

    That is the device and precision, the threads of a client, and the rounds that noise is calibrated for; these
    follow from the number of rounds, so they are taken over only where that is the same.

    Args:
        job: the job.
        folder: the stage's output folder, in which a run has begun.

    Raises:
        UserError: its ``job.toml`` is damaged.
    """
    job, engine, privacy = as_recorded(job, folder), job.engine, job.privacy
    before = read_toml(folder / "job.toml") if (folder / "job.toml").exists() else {}
    if engine.threads == "auto" and (threads := recorded_threads(folder)):
        engine = engine.model_copy(update={"threads": threads})
    settled = before.get("privacy", {}).get("participations")
    same = before.get("method", {}).get("rounds") == job.method.rounds
    if privacy.level != "none" and privacy.noise is None and privacy.participations is None and same:
        privacy = privacy.model_copy(update={"participations": settled})
    return job.model_copy(update={"engine": engine, "privacy": privacy})


def check_begun(jobs: Sequence[Job], places: Sequence[Path], components: Components) -> None:
    """Compare every stage that has begun with its job, before anything is trained.

    Raises:
        UserError: one began with another job, or is to get more rounds and another stage has begun from its model.
    """
    for job, place in zip(jobs, places, strict=True):
        found = changes(job, place, components.of(job).identities())
        if any(change.key == "method.rounds" for change in found):
            for later, there in zip(jobs, places, strict=True):
                if later.start == job.stage and later.model is None and (there / "job.toml").exists():
                    raise UserError(
                        f"{place}: method.rounds: cannot be changed, as stage {later.stage!r} has begun from "
                        "the model of this one"
                    )


def check_kept(folder: Path, commit: Mapping[str, Any]) -> None:
    """Refuse more rounds of a stage that has ended and has not kept its state.

    Args:
        folder: its output folder.
        commit: its newest one; empty if there is none.

    Raises:
        UserError: it has ended so.
    """
    if "finished" in commit and not commit["kept"]:
        raise UserError(
            f"{folder}: its run has ended after {commit['done']} rounds and its state was not kept, so it "
            "cannot get more of them; output.keep_state = true keeps it"
        )


def check_model(job: Job, folder: Path) -> str:
    """What is said of a finished stage's model that is not as the stage has left it; empty where it is, or gone.

    Raises:
        UserError: its clients' models are made of it.
    """
    path = changed_model(folder)
    if path is None or not path.parent.exists():
        return ""
    what = f"{path} is damaged, missing or another one since its run has written it"
    if path.parent.name == "shared" and job.output.client_models is not False and not job.between_sites:
        raise UserError(f"{what}, and the clients' models are made of it")
    return f"{what}; the score is that of the model as it was"


def left_by(earlier: Result, job: Job, place: Path) -> str:
    """The folder of the model that an earlier stage has left for another one to begin from.

    Args:
        earlier: the result of the stage that has ended.
        job: the job of the one that is to begin.
        place: its output folder; a stage that has begun knows by itself from what.

    Raises:
        UserError: it is not as that stage has left it.
    """
    if not manifests(place) and (path := changed_model(earlier.place)):
        raise UserError(
            f"{path}: is damaged, missing or another one since stage {job.start!r} has written it, and stage "
            f"{job.stage!r} is to begin from it"
        )
    return str(earlier.start)
