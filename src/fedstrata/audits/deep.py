"""Attacks on the model that a client's training ends in: membership, and canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstrata.audits import canaries, text_gradients
from fedstrata.audits.bench import Bench
from fedstrata.audits.finding import Finding
from fedstrata.audits.membership import (
    LEAST,
    Pool,
    Shadows,
    found_in,
    pool_of,
    shadow_trainings,
    small,
    start_losses,
    texts_of,
)
from fedstrata.audits.settings import own_steps
from fedstrata.audits.short_training import SHORT, ShortTrainings
from fedstrata.audits.some_texts import losses
from fedstrata.client.model_options import head_of
from fedstrata.client.setup import init_seed
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.fingerprint import difference, fingerprints
from fedstrata.errors import UserError, plural
from fedstrata.events import Noted
from fedstrata.job.tables import Job
from fedstrata.job.toml import read_toml
from fedstrata.models import checkpoints
from fedstrata.runs.resume import changes
from fedstrata.runs.start import start_digest
from fedstrata.server.ended import changed_model
from fedstrata.server.state import newest_commit
from fedstrata.wire.files import read_sealed

Plays = list[dict[str, Any]]
FINAL = "final model"
"""The model of a run, which is attacked as that of a short training is."""


def deep(bench: Bench, folder: Path, notes: list[str]) -> tuple[list[Finding], Plays]:
    """What the attacks find, and what was trained for them.

    Args:
        bench: the stage.
        folder: its run's output folder, where there is one.
        notes: takes what was not attacked, and why.
    """
    final = _final_model(bench, folder, notes)
    trainings, why = ShortTrainings(bench), _closed(bench)
    pool = pool_of(bench)
    enough = len(pool.own) >= LEAST
    if not enough:
        notes.append(f"no membership: the client and the test rows have fewer than {LEAST} distinct texts")
    if why:
        notes.append(f"no short training is attacked: {why}")
    findings: list[Finding] = []
    shadows = Shadows(start_losses(bench, pool))
    if enough and not why:
        shadows, target, member = shadow_trainings(trainings, pool)
        scores = shadows.scores(trainings.losses(target, pool.batches))
        findings += found_in(bench, SHORT, plural(target.reply.steps, "step"), scores, member)
        findings += text_gradients.attack(trainings, pool, target, member)
        notes += _small(SHORT, int((~member).sum()))
    if enough and final is not None:
        findings += _final(bench, pool, shadows, final, notes)
    if not why:
        findings += canaries.attack(trainings)
    notes += [*_drawn_of_nobody(trainings), *_beyond_epsilon(trainings)]
    if trainings.cut:
        notes.append(f"short trainings pass over their texts fewer times than the run's {trainings.cut:,}")
    return findings, trainings.plays


def _drawn_of_nobody(trainings: ShortTrainings) -> list[str]:
    """At level ``example`` a step may draw no text: of its message there is then no finding."""
    return [
        f"{play['setting']}: the draw of examples took none of the texts, so its message was not attacked"
        for play in trainings.plays
        if not play["texts"]
    ]


def _beyond_epsilon(trainings: ShortTrainings) -> list[str]:
    """What to say where trainings take more steps than the run, or draw from fewer texts."""
    bench, plays, fewest = trainings.bench, trainings.plays, trainings.fewest
    if bench.job.privacy.level != "example" or not plays:
        return []
    whole, most = bench.job.method.rounds * own_steps(bench), max(int(play["steps"]) for play in plays)
    if most <= whole and fewest >= len(bench.index):
        return []
    return [
        f"short trainings have the run's noise in every step, but take up to {plural(most, 'step')} and draw "
        f"from {plural(fewest, 'text')} or more, where the run takes {whole:,} and draws from "
        f"{len(bench.index):,}: they tell more than its epsilon lets through"
    ]


def _closed(bench: Bench) -> str:
    """Why there is no model of this client alone to attack; empty if there is one."""
    if bench.exchange.payload != "weights":
        return f"of {bench.exchange.payload} the client alone makes no model"
    if not bench.exchange.sends(bench.plan):
        return "nothing leaves the clients"
    if bench.job.privacy.sum_only:
        return "single messages are masked ([privacy] sum_only), so there is no model of one client"
    return ""


def _small(model: str, held_out: int) -> list[str]:
    return [f"{model}: {words}"] if (words := small(held_out)) else []


def _final(bench: Bench, pool: Pool, shadows: Shadows, final: Path, notes: list[str]) -> list[Finding]:
    """Membership in a run's final model: the client's texts against held-out ones."""
    own, held_out = texts_of(pool)
    if min(own, held_out) < LEAST // 2:
        notes.append(
            f"the final model is not attacked: of the client {plural(own, 'text')}, and "
            f"{plural(held_out, 'test text')} that no client trains on, are too few to compare"
        )
        return []
    job = bench.job
    bench.tell(Noted(f"{job.stage or 'this job'}: attacking {final}"))
    loaded = checkpoints.load(
        str(final), job.task.kind, bench.data.labels, init_seed(job), job.train.dropout, head_of(job)
    )
    working = WorkingModel(loaded.model, loaded.parts, job.train.device, job.train.precision == "bf16")
    target = losses(bench, working, pool.batches)
    if not bench.ready.tests:
        notes.append(
            "final model: texts that the client has are compared with test rows; where these are of other kinds, "
            "they are told apart for that reason too"
        )
    notes += _small(FINAL, held_out)
    return found_in(bench, FINAL, plural(job.method.rounds, "round"), shadows.scores(target), pool.own)


def _final_model(bench: Bench, folder: Path, notes: list[str]) -> Path | None:
    """The final model of this job's run that has the client's training in it; None where there is none."""
    places = [folder / "clients" / bench.client / "model", folder / "model"]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        notes.append(f"no final model is attacked: {folder} holds none of a run of this job")
        return None
    try:
        changes(_on_its_machine(bench.job, folder), folder)
        rows = read_sealed(folder / "state" / "rows.json")
        if rows is not None and (other := difference(rows, fingerprints(bench.data))):
            raise UserError(f"{folder}: {other}")
        _check_models(bench, folder)
    except UserError as error:
        notes.append(f"no final model is attacked, as it is another job's: {error}")
        return None
    return found


def _check_models(bench: Bench, folder: Path) -> None:
    """The run began from the job's model, and its own is as it was left."""
    if (commit := newest_commit(folder)) is None:
        return
    if bench.begins is None and commit["start"] != start_digest(bench.start, bench.ready.loaded):
        raise UserError(
            f"{folder}: its run began from other weights, config or tokenizer than the job's model has now"
        )
    if (path := changed_model(folder)) is not None:
        raise UserError(f"{path}: not as the run has left it")


def _on_its_machine(job: Job, folder: Path) -> Job:
    """The job with the device, precision and threads of its run, which may have been on another machine."""
    recorded = read_toml(folder / "job.toml")
    train, engine = recorded.get("train", {}), recorded.get("engine", {})
    same = {key: train[key] for key in ("device", "precision") if key in train}
    threads = {"threads": engine["threads"]} if "threads" in engine else {}
    return job.model_copy(
        update={
            "train": job.train.model_copy(update=same),
            "engine": job.engine.model_copy(update=threads),
        }
    )
