"""From a job to what it will cost one client, and all of them, before anything runs."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.client.setup import check_plans, head_of, model_path, resolve_auto, write_outline
from fedstrata.cost import papers
from fedstrata.cost.bytes import payload
from fedstrata.cost.ledger import SETUP
from fedstrata.data.partition import check_partition, client_names
from fedstrata.data.prepare import Prepared, population, prepare, source_names
from fedstrata.engines.dry import dry_run
from fedstrata.errors import UserError, did_you_mean
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.exchange import DryContext
from fedstrata.job.file import Overrides, load, pairs_of
from fedstrata.job.tables import Job, method_name
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models import checkpoints
from fedstrata.models.heads import HeadConfig
from fedstrata.models.memory import step_memory
from fedstrata.plan.kinds import Index
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.streams import Streams
from fedstrata.runs.train import round_settings
from fedstrata.tasks import Task, TaskContext, build_task
from fedstrata.tasks.examples import examples
from fedstrata.wire.codec import make_codec
from fedstrata.wire.dry import DryWire

EXAMPLES = 1000
"""Examples of each client where neither the job's data nor the caller says how many there are."""
NO_DATA = "-"
"""``data.train`` of a job that is forecast without data."""


Step = Callable[[Plan, int, int, int, bool], int]
"""Bytes of a training step, see :func:`fedstrata.models.memory.step_memory`."""


@dataclass(frozen=True)
class Known:
    """What is made once per model, task, classes and head, however many methods are forecast."""

    parts: Callable[[str, str, tuple[str, ...] | None, HeadConfig | None], Parts]
    step: Callable[[str, str, tuple[str, ...] | None, HeadConfig | None], Step]


@dataclass(frozen=True)
class DataProfile:
    """What the clients hold, as far as costs depend on it.

    Attributes:
        lengths: tokens of every example, ``[n]``.
        shards: client -> its examples.
        labels: class names, where they are known.
        tests: makes, for each client, the tokens of every example that it is scored on.
        told: where this comes from, a sentence.
    """

    lengths: Index
    shards: dict[str, Index]
    labels: tuple[str, ...] | None
    told: str
    tests: Callable[[], dict[str, Index]]


def forecast(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    methods: Sequence[str] = (),
    count: int | None = None,
    tokens: int | None = None,
    client: str | None = None,
    bandwidth: float | None = None,
    gflops: float | None = None,
    units: str | None = None,
) -> dict[str, dict[str, Any]]:
    """See :func:`fedstrata.forecast`."""
    if units is not None and units not in papers.UNITS:
        raise UserError(f"--units: no paper {units!r}; {did_you_mean(units, papers.UNITS)}")
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else None
    given = list(pairs_of(overrides))
    variants = [[*given, ("method.name", name)] for name in methods] or [given]
    held: list[DataProfile] = []  # by stage; no method changes it
    known = Known(functools.cache(checkpoints.parts_of), functools.cache(_step_of))
    made: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as outlines:
        for pairs in variants:
            jobs = [resolve_auto(job) for job in load(source, pairs)]
            start: dict[str, str] = {}
            for job in jobs:
                place = Path(outlines) / (job.stage or "start")
                start[job.stage] = _start(job, base_dir, place) if job.model else start[job.start]
            held = held or [data_profile(job, base_dir, start[job.stage], count, tokens) for job in jobs]
            stages = [
                _stage(job, start[job.stage], one, client, known) for job, one in zip(jobs, held, strict=True)
            ]
            name = " → ".join(dict.fromkeys(method_name(job.method) for job in jobs))
            made[name] = _together(stages, bandwidth, gflops)
            if units is not None:
                made[name]["units"] = [
                    _in_units(units, job, start[job.stage], stage, known)
                    for job, stage in zip(jobs, stages, strict=True)
                ]
    return made


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
    parts = known.parts(model, job.task.kind, stage["labels"], head_of(job))
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
    made = {"stage": job.stage, "upload": figure, "what": what, "of_fedavg": figure / whole}
    trained = stage["rounds"][0]["layers"] if stage["rounds"] else []
    if job.task.kind == "mlm" and len(trained) == 1 and unit in papers.COMPUTE:
        embeddings = next(iter(parts.shapes["embeddings"].values()))
        depth = len(make_plan(job.method, parts, "mlm", 0, stage["client"], Streams(job.train.seed)).layers)
        made["compute_of_fedavg"] = papers.compute(
            depth, job.train.max_tokens, parts.hidden, embeddings[0], trained[0], parts.depth
        )
    return made


def data_profile(
    job: Job, base_dir: Path | None, model: str, count: int | None, tokens: int | None
) -> DataProfile:
    """The lengths of the clients' examples: the job's own if its data is there, else ``count`` of ``tokens``."""
    config = checkpoints.config_of(model)
    longest = min(tokens or job.train.max_tokens, config.max_position_embeddings)
    named = tuple(job.task.labels) if job.task.labels else None
    if count is None and job.data.train not in ("", NO_DATA):
        try:
            data = prepare(job, base_dir)
        except UserError as error:
            reason = f"the data cannot be read ({error})"
        else:
            try:
                if tokens is not None:
                    raise UserError(f"--tokens says {tokens}")
                tokenizer = checkpoints.tokenizer_of(model, job.task.kind)
                made = examples(job, data.train, data.labels, tokenizer, data.shards.values()).tokens
            except UserError as error:
                lengths = np.full(len(data.train), longest, dtype=np.int64)
                told = f"{len(lengths)} training rows of the job's data at {longest} tokens each ({error})"
                count_of = {name: len(rows) for name, rows in (data.tests or {}).items()}
                tests = {name: np.full(count_of.get(name, len(data.test)), longest) for name in data.shards}
                return DataProfile(lengths, data.shards, data.labels, told, lambda: tests)
            shards = {name: made.of_rows(rows) for name, rows in data.shards.items()}
            told = f"{len(made)} training examples of the job's data"
            return DataProfile(
                made.lengths, shards, data.labels, told, functools.cache(lambda: _tested(job, data, model))
            )
    else:
        reason = ""
    check_partition(job.clients)
    each = count or EXAMPLES
    names = client_names(job.clients, source_names(job))
    number = len(names)
    shards = {name: np.arange(i * each, (i + 1) * each) for i, name in enumerate(names)}
    told = f"{each} examples of {longest} tokens at each of {number} clients"
    told += f": {reason}" if reason else ""
    if named is None and TASK_KINDS[job.task.kind].classes:
        told += f", {config.num_labels} classes"
    share = job.clients.test or job.data.holdout * number
    tests = dict.fromkeys(names, np.full(max(1, round(share * each)), longest, dtype=np.int64))
    return DataProfile(np.full(number * each, longest, dtype=np.int64), shards, named, told, lambda: tests)


def _tested(job: Job, data: Prepared, model: str) -> dict[str, Index]:
    """For each client the tokens of every test example that it is scored on, as often as it is."""
    own = None if data.tests is None else data.tests.values()
    test = examples(job, data.test, data.labels, checkpoints.tokenizer_of(model, job.task.kind), own)
    made = {}
    for name in data.shards:
        chosen = np.arange(len(test)) if data.tests is None else test.tokens.of_rows(data.tests[name])
        again = [np.intersect1d(chosen, pool) for pool in test.pools.values()]
        made[name] = test.tokens.lengths[np.concatenate([chosen, *again])]
    return made


def _stage(job: Job, model: str, profile: DataProfile, client: str | None, known: Known) -> dict[str, Any]:
    """One stage's costs: of each round of one client, and of all clients together."""
    parts = known.parts(model, job.task.kind, profile.labels, head_of(job))
    shards = population(job.method.population, profile.shards)
    check_plans(job, parts, profile.shards)
    name = _whose(client, shards, profile.shards)
    task = build_task(TaskContext(job, profile.labels))
    context = _dry_context(job, parts, profile, shards, task)
    records = dry_run(context, job.task.kind, round_settings(job))
    memory = _memory(job, task, known.step(model, job.task.kind, profile.labels, head_of(job)))
    sums = _bytes(records.lines("ledger"))
    work = records.lines("rounds")
    own = {line["round"]: line for line in work if line["client"] == name}
    rounds = []
    for round in range(job.method.rounds):
        line = own.get(round, {})
        plan = Plan((), ())
        if line.get("trained"):
            plan = make_plan(job.method, parts, job.task.kind, round, name, context.streams)
        rounds.append(
            {
                "round": round,
                "stage": job.stage,
                "up_bytes": sums[round, name, "up"],
                "down_bytes": sums[round, name, "down"],
                "train_flops": line.get("flops", 0),
                "peak_memory_bytes": memory(plan, context.lengths[name]) if line else 0,
                "layers": list(parts.depths(plan.train)),
                "trained": list(plan.train),
                "sent": list(plan.send),
            }
        )
    return {
        "split": EXCHANGES[job.method.exchange].forecast(context, context.lengths[name]),
        "client": name,
        "labels": profile.labels,
        "setup": {"down_bytes": sums[SETUP, name, "down"]},
        "rounds": rounds,
        "clients": _everyone(len(shards), sums, work),
        "holdings": profile.told,
        "examples": sum(map(len, shards.values())),
        "collects": any(line["phase"] == "hidden_states" for line in records.lines("ledger")),
        "parts": [{"name": part.name, "kind": part.kind, "depth": part.depth} for part in parts.each],
    }


def _whose(client: str | None, shards: Mapping[str, Index], named: Mapping[str, Index]) -> str:
    """The client whose costs are told.

    Raises:
        UserError: there is no such client.
    """
    first = next(iter(shards))
    if client is not None and client not in shards and client not in named:
        raise UserError(f"--client: no client {client!r}; {did_you_mean(client, shards)}")
    return client if client is not None and client in shards else first


def _dry_context(
    job: Job, parts: Parts, profile: DataProfile, shards: Mapping[str, Index], task: Task
) -> DryContext:
    return DryContext(
        method=job.method,
        parts=parts,
        streams=Streams(job.train.seed),
        train=job.train,
        wire=DryWire(make_codec(job.wire.dtype)),
        dtype=job.wire.dtype,
        lengths={name: profile.lengths[index] for name, index in shards.items()},
        tests=profile.tests,
        predicted=task.head_positions,
    )


def _bytes(ledger: Iterable[Mapping[str, Any]]) -> Counter[tuple[int, str, str]]:
    """(round, client, direction) -> bytes; the score before training goes with the first round."""
    sums = Counter[tuple[int, str, str]]()
    for line in ledger:
        round = SETUP if line["phase"] == "setup" else max(0, line["round"])
        sums[round, line["client"], line["direction"]] += line["bytes"]
    return sums


def _everyone(
    count: int, sums: Mapping[tuple[int, str, str], int], work: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """All clients' costs together."""
    at_server = sum(line.get("server_flops", 0) for line in work)
    return {
        "count": count,
        "setup_bytes": sum(n for (round, _, _), n in sums.items() if round < 0),
        "up_bytes": sum(n for (round, _, way), n in sums.items() if round >= 0 and way == "up"),
        "down_bytes": sum(n for (round, _, way), n in sums.items() if round >= 0 and way == "down"),
        "train_flops": sum(line.get("flops", 0) for line in work) + at_server,
        "server_flops": at_server,
    }


def _memory(job: Job, task: Task, step: Step) -> Callable[[Plan, Index], int]:
    train = job.train

    def memory(plan: Plan, lengths: Index) -> int:
        rows = min(train.batch_size, len(lengths))
        width = train.max_tokens if train.padding == "max" else int(lengths.max())
        predicted = task.head_positions(np.full(rows, width), width) if task.gathers else 0
        return step(plan, rows, width, predicted, train.precision == "bf16")

    return memory


def _step_of(model: str, kind: str, labels: tuple[str, ...] | None, head: HeadConfig | None) -> Step:
    config = checkpoints.config_of(model, kind, labels, head)
    return step_memory(checkpoints.class_of(kind, config), config)


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
        "setup": {"down_bytes": sum(stage["setup"]["down_bytes"] for stage in stages)},
        "rounds": rounds,
        "total": total,
        "clients": {**summed, "count": everyone[0]["count"]},
        "holdings": [stage["holdings"] for stage in stages],
        "split": next((stage["split"] for stage in stages if stage["split"]), None),
    }
