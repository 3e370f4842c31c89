"""From a job to what it will cost one client, and all of them, before anything runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import fit_positions, resolve_jobs
from fedstrata.client.start_model import model_path, write_outline
from fedstrata.cost import papers
from fedstrata.cost.bytes import payload
from fedstrata.data.prepare import NO_DATA, population, prepare
from fedstrata.errors import UserError
from fedstrata.forecasts.options import ForecastOptions
from fedstrata.forecasts.profile import DataProfile, data_profile
from fedstrata.forecasts.stage import Known, nothing_known, stage_costs
from fedstrata.job.file import JobSource, Overrides, load, pairs_of
from fedstrata.job.privacy_rules import check_task
from fedstrata.job.tables import Job, method_name
from fedstrata.models.fresh_torch import fresh_torch
from fedstrata.models.quiet import quiet
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.runs.models import check_start
from fedstrata.runs.notes import check_names
from fedstrata.runs.privacy import Record, combined_privacy, dealt_otherwise


@quiet()
@fresh_torch()
def forecast(source: JobSource, overrides: Overrides, options: ForecastOptions) -> dict[str, dict[str, Any]]:
    """See :func:`fedstrata.forecast`."""
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else None
    given = list(pairs_of(overrides))
    variants = [[*given, ("method.name", name)] for name in options.methods] or [given]
    profiles: list[DataProfile] = []  # by stage; no method changes it
    known = nothing_known()
    costs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as outlines:
        for pairs in variants:
            jobs = resolve_jobs(load(source, pairs, options.components.method), base_dir)
            for job in jobs:
                check_names(job)
                check_task(job, options.components.task)
            start: dict[str, str] = {}
            for job in jobs:
                place = Path(outlines) / (job.stage or "start")
                start[job.stage] = _start(job, base_dir, place) if job.model else start[job.start]
            jobs = [fit_positions(job, known.longest(start[job.stage], job.task.kind)) for job in jobs]
            profiles = profiles or [
                data_profile(job, base_dir, start[job.stage], options.count, options.tokens) for job in jobs
            ]
            _check_starts(jobs, profiles, start, known)
            stages = [
                stage_costs(job, start[job.stage], profile, known, options)
                for job, profile in zip(jobs, profiles, strict=True)
            ]
            name = " → ".join(dict.fromkeys(method_name(job.method) for job in jobs))
            costs[name] = _together(stages, options.bandwidth, options.gflops)
            told = [(job.stage, stage["privacy"]) for job, stage in zip(jobs, stages, strict=True)]
            otherwise = dealt_otherwise(jobs, [profile.texts for profile in profiles])
            costs[name]["privacy"] = _on_assumptions(combined_privacy(told, otherwise), profiles)
            if options.units is not None:
                costs[name]["units"] = [
                    _in_units(options.units, job, start[job.stage], stage, known)
                    for job, stage in zip(jobs, stages, strict=True)
                ]
    return costs


def _on_assumptions(privacy: Record | None, profiles: Sequence[DataProfile]) -> Record | None:
    """What will be spent, and for how many examples, where these were not counted: epsilon follows from them."""
    assumed = next((profile.assumed for profile in profiles if profile.assumed), "")
    return {**privacy, "assumed": assumed} if privacy and privacy["level"] == "example" and assumed else privacy


def _check_starts(
    jobs: Sequence[Job], profiles: Sequence[DataProfile], start: Mapping[str, str], known: Known
) -> None:
    """Refuse stages that could not begin with the model of the one before, as a run does."""
    made: dict[str, tuple[Job, Parts, list[str]]] = {}
    for job, profile in zip(jobs, profiles, strict=True):
        parts = known.parts(start[job.stage], job.task.kind, profile.labels, head_of(job), adapter_of(job))
        if job.start in made:
            check_start(job, parts, *made[job.start])
        made[job.stage] = job, parts, list(population(job.method.population, profile.shards))


def _start(job: Job, base_dir: Path | None, place: Path) -> str:
    """Folder or hub id of a job's model; of a new one its outline, made in ``place`` once for all methods.

    Where its tokenizer is to be trained and the job's data cannot be read, the vocabulary is the config's.
    """
    assert job.model is not None
    if job.model.config is None:
        return model_path(job, base_dir)
    if place.exists():
        return str(place)
    data = None
    if job.data.train not in ("", NO_DATA):
        with suppress(UserError):
            data = prepare(job, base_dir)
    return write_outline(job, data, base_dir, place)


def _in_units(unit: str, job: Job, model: str, stage: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """A stage's figures as a paper would print them: what goes up, beside that of FedAvg, and what is computed."""
    if job.wire.codec != "none":
        raise UserError("--units: the papers send whole parts; [wire] codec = 'none' counts as they do")
    parts = known.parts(model, job.task.kind, stage["labels"], head_of(job), adapter_of(job))
    sent = [round["sent"] for round in stage["rounds"]]
    count = stage["clients"]["count"]
    figure, what = papers.upload(unit, parts, job.task.kind, sent or [()], count, job.wire.dtype)
    if unit == "fedfreezebert" and stage["collects"]:
        taken = max(1, len(parts.head_layers))
        figure, true = (
            papers.features(
                stage["examples"], job.train.max_tokens, parts.hidden, count, payload(parts, ["head"]), layers
            )
            for layers in (1, taken)
        )
        what = "GiB of one hidden state per token up, MB / 1024 of heads down, all clients"
        what += f"; {true:.2f} with the {taken} that this head takes" if taken > 1 else ""
    whole, _ = papers.upload(unit, parts, job.task.kind, [parts.names] * max(1, len(sent)), count)
    figures = {"stage": job.stage, "upload": figure, "what": what, "of_fedavg": figure / whole}
    trained = stage["rounds"][0]["layers"] if stage["rounds"] else []
    if job.task.kind == "mlm" and len(trained) == 1 and unit in papers.COMPUTE:
        embeddings = next(iter(parts.shapes["embeddings"].values()))
        depth = len(make_plan(job.method, parts, "mlm", 0, stage["client"], Streams(job.train.seed)).layers)
        figures["compute_of_fedavg"] = papers.compute(
            depth, job.train.max_tokens, parts.hidden, embeddings[0], trained[0], parts.depth
        )
    return figures


def _together(stages: Sequence[dict[str, Any]], bandwidth: float | None, gflops: float | None) -> dict[str, Any]:
    rounds = [round for stage in stages for round in stage["rounds"]]
    for round in rounds if bandwidth or gflops else ():
        wire = 8 * (round["up_bytes"] + round["down_bytes"]) / (bandwidth * 1e6) if bandwidth else 0.0
        round["seconds"] = wire + (round["train_flops"] / (gflops * 1e9) if gflops else 0.0)
    kinds = ("up_bytes", "down_bytes", "train_flops", *(("seconds",) if bandwidth or gflops else ()))
    total: dict[str, Any] = {kind: sum(round[kind] for round in rounds) for kind in kinds}
    total["peak_memory_bytes"] = max((round["peak_memory_bytes"] for round in rounds), default=0)
    everyone = [stage["clients"] for stage in stages]
    summed = {key: sum(one[key] for one in everyone) for key in everyone[0]}
    return {
        "client": stages[0]["client"],
        "parts": list({part["name"]: part for stage in stages for part in stage["parts"]}.values()),
        "setup": {"down_bytes": sum(stage["setup"]["down_bytes"] for stage in stages)},
        "rounds": rounds,
        "total": total,
        "clients": {**summed, "count": everyone[0]["count"]},
        "holdings": [stage["holdings"] for stage in stages],
        "sums": next((stage["sums"] for stage in stages if stage["sums"]), None),
        "readable": list(dict.fromkeys(line for stage in stages for line in stage["readable"])),
        "split": next((stage["split"] for stage in stages if stage["split"]), None),
        "asynchronous": next((stage["asynchronous"] for stage in stages if stage["asynchronous"]), None),
    }
