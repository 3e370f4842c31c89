"""A job from its file to its output folder, stage by stage."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fedstrata.data.prepare import Prepared, population, prepare, prepare_test
from fedstrata.engines.local import LocalEngine
from fedstrata.errors import UserError
from fedstrata.events import Encoded, Event, StageEnded, StageStarted
from fedstrata.job.file import Overrides, load
from fedstrata.job.tables import Job, method_name
from fedstrata.models import checkpoints, scratch
from fedstrata.models.parts import part_tensors
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Engine
from fedstrata.reports.page import write_page
from fedstrata.reports.runs import load_run
from fedstrata.runs.folder import claim, same_job, status_on_disk
from fedstrata.runs.result import Result, read_result, read_status, together
from fedstrata.runs.setup import (
    Ready,
    check_permission,
    check_plans,
    head_of,
    init_seed,
    make_ready,
    model_path,
    notes,
    outline,
    settle,
)
from fedstrata.server import state
from fedstrata.server.layers import ServerLayers
from fedstrata.server.rounds import Rounds
from fedstrata.server.server import Server, ServerOptimizer
from fedstrata.server.trainer import ServerTrainer
from fedstrata.sites.federation import Federation, check_sites, federation, names_of, settle_sites, sites
from fedstrata.wire.store import Store, write_bytes

Tell = Callable[[Event], None]
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
    jobs = [settle_sites(settle(job)) for job in load(source, overrides)]
    if len({job.between_sites for job in jobs}) > 1:
        raise UserError("[engine] name: must be the same in all stages")
    near = Path(source).resolve().parent if isinstance(source, str | Path) else None
    folder = Path(jobs[0].output.dir)
    claim(folder, resume)
    for job in jobs:
        if not job.between_sites:
            check_permission(job)
    tell = progress or (lambda event: None)
    data = [prepare_test(job, near) if job.between_sites else prepare(job, near) for job in jobs]
    places = [folder / "stages" / job.stage if len(jobs) > 1 else folder for job in jobs]
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as made:
        starts = [
            _start(job, rows, place, near, Path(made) / (job.stage or "start")) if job.model else None
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
    result = together(list(results.values()), folder) if len(jobs) > 1 else results[job.stage]
    write_page([load_run(folder)], folder / "report.html")
    return result


def _start(job: Job, data: Prepared, place: Path, near: Path | None, made: Path) -> str:
    """Folder or hub id of a job's model; a new one is what an earlier call left, else an outline in ``made``."""
    assert job.model is not None
    if job.model.config is None:
        return model_path(job, near)
    return str(place / START) if (place / START).exists() else outline(job, data, near, made)


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
            _train(job, data, ready, folder, tell, far)
        state.prune(folder, job.train.keep_feature_cache)
    tell(StageEnded(job.stage, reused))
    return read_result(folder)


def _train(job: Job, data: Prepared, ready: Ready, folder: Path, tell: Tell, far: Federation | None) -> None:
    worker, parts = ready.worker, ready.worker.parts
    clients = list(ready.shards) if far is None else names_of(job)
    weights = {
        part: {name: t.to("cpu", copy=True) for name, t in part_tensors(worker.model, parts, [part]).items()}
        for part in parts.names
    }
    start = state.fingerprint(weights)
    worker.encoded = lambda done, total: tell(Encoded(done, total))
    settings = job.server.model_dump(exclude={"evaluate", "optimizer", "aggregate"})
    rule = ServerOptimizer(**settings, name=job.server.optimizer)
    server = Server(parts, weights, rule, job.wire.dtype)
    done, seconds = state.restore(folder, server, start)

    plan = job.method.plan(parts, job.task.kind, 0, clients[0], worker.streams)
    kept = folder / "state" / "test" if plan.freeze_encoder else None

    def score(server: Server) -> dict[str, float]:
        worker.load({part: (_tag(server, part), server.weights[part]) for part in parts.names})
        return worker.score(ready.test, folder=kept)

    central = None
    if job.method.exchange == "hidden_states":
        classes = None if data.labels is None else len(data.labels)
        central = ServerTrainer(worker, clients, classes, server.dtype, folder / "state" / "received")
    layers = None
    if plan.server:
        layers = ServerLayers(
            worker=worker,
            server=server,
            names=plan.server,
            copies=job.method.client_schedule == "parallel",
            longest=checkpoints.max_positions(worker.model),
            folder=folder / "state" / "layers",
        )
    with _clients(job, data, ready, weights, server, layers, folder, tell, far) as (engine, sizes):
        _write_split(job, folder, data, ready, sizes)
        rounds = Rounds(
            method=job.method,
            task=job.task.kind,
            server=server,
            engine=engine,
            streams=worker.streams,
            fraction=job.clients.fraction,
            quorum=job.engine.quorum,
            each_round=job.server.evaluate == "rounds",
            own_tests=job.clients.test is not None,
            score=score,
            folder=folder,
            tell=tell,
            central=central,
            layers=layers,
        )
        tokens = int(ready.train.tokens.lengths.sum())
        said = notes(job, ready.loaded, data, tokens)
        tell(StageStarted(job.stage, method_name(job.method), job.method.rounds, done, sizes, said))
        rounds.run(done, start, seconds)
    _save_models(job, folder, ready.loaded, server, clients)


@contextmanager
def _clients(
    job: Job,
    data: Prepared,
    ready: Ready,
    start: Weights,
    server: Server,
    layers: ServerLayers | None,
    folder: Path,
    tell: Tell,
    far: Federation | None,
) -> Iterator[tuple[Engine, dict[str, int]]]:
    """What reaches the clients, and how many examples each has."""
    if far is not None:
        with sites(job, data, ready, start, layers, folder, tell, far) as reached:
            yield reached
        return
    engine = LocalEngine(
        worker=ready.worker,
        examples=ready.train,
        shards=ready.shards,
        test=ready.test,
        tests=ready.tests,
        folder=folder / "state" / "clients",
        shared={part: (server.versions[part], server.received(part)) for part in server.parts.names},
        tell=tell,
        layers=layers,
    )
    yield engine, {client: len(index) for client, index in ready.shards.items()}


def _tag(server: Server, part: str) -> object:
    """Equal to the clients' tag only where what they received is what the server has."""
    version = server.versions[part]
    return version if server.dtype == "fp32" or not version else ("server", version)


def _write_split(job: Job, folder: Path, data: Prepared, ready: Ready, sizes: Mapping[str, int]) -> None:
    clients: dict[str, Any] = {name: {"rows": n, "examples": n, "labels": None} for name, n in sizes.items()}
    shards = population(job.method.population, data.shards)
    for client, index in ready.shards.items():
        rows = shards[client]
        labels = None if data.by is None else dict(sorted(Counter(data.by[i] for i in rows).items()))
        clients[client] = {"rows": len(rows), "examples": len(index), "labels": labels}
    tests = {name: len(index) for each in ready.tests.values() for name, index in each.items()}
    test = sum(tests.values()) if tests else len(ready.test)
    split = {"clients": clients, "test": test, "tests": tests, "left_out": data.dropped}
    write_bytes(folder / "partition.json", json.dumps(split, indent=1, ensure_ascii=False).encode())


def _save_models(
    job: Job, folder: Path, loaded: checkpoints.Loaded, server: Server, clients: Sequence[str]
) -> None:
    """The server's model; with one client that keeps parts, that client's. Others' on request."""
    kept = {client: Store(folder / "state" / "clients" / client).load(job.method.rounds) for client in clients}
    whole = {name: tensor for weights in server.weights.values() for name, tensor in weights.items()}
    own = {client: {**whole, **parts} for client, parts in kept.items() if parts}
    for client, weights in own.items() if job.output.client_models else ():
        checkpoints.save(loaded, weights, folder / "clients" / client / "model")
    alone = own.get(clients[0], whole) if len(clients) == 1 else whole
    checkpoints.save(loaded, alone, folder / "model")
