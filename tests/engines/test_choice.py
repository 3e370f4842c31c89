"""Which engine plays a job's clients: the rule on made-up machines, with figures reckoned by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.engines import choice
from fedstrata.engines.choice import CONTEXT, LIBRARIES, START, Choice, Work, choose, train_seconds, worker_bytes
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.tables import Job
from fedstrata.plan.parts import Part, Parts
from fedstrata.runs.components import Components
from fedstrata.runs.engines import choose_engine

LINEAR = 10_000_000
"""Weights of a layer that is multiplied with."""
PARTS = Parts(
    (
        Part("embeddings", "embeddings", None, {"words": (1000, 64)}),
        Part("layer.0", "layer", 0, {"w0": (64, 64)}, (LINEAR,)),
        Part("layer.1", "layer", 1, {"w1": (64, 64)}, (LINEAR,)),
    ),
    stack="layers",
    tied=0,
    hidden=64,
)
FOUR = Work({f"client-{i}": 95 for i in range(4)}, tokens=50.0, parts=PARTS)
"""Ten batches of ten texts for each of four clients: 96 seconds of a core in two rounds, and 1.2 for the calls."""


def job(**tables: dict[str, Any]) -> Job:
    made: dict[str, dict[str, Any]] = {
        "model": {"name": "none"},
        "task": {"kind": "mlm"},
        "data": {"train": "none.csv"},
        "clients": {"count": 4},
        "method": {"name": "fedavg", "rounds": 2},
        "train": {"batch_size": 10, "max_tokens": 64, "device": "cpu"},
    }
    for key, table in tables.items():
        made[key] = {**made.get(key, {}), **table}
    return load(made)[0]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=2)


def machine(patch: pytest.MonkeyPatch, cores: int, gigabytes: float = 100, fork: bool = True) -> None:
    patch.setattr(choice, "cores", lambda: cores)
    patch.setattr(choice, "memory", lambda: int(gigabytes * 1e9))
    patch.setattr(choice, "can_fork", lambda: fork)


def test_training_is_reckoned_by_hand() -> None:
    tokens = 10 * 50 * 10 * 4 * 2  # texts, tokens, batches, clients, rounds
    flops, calls = 6 * 2 * LINEAR * tokens / 5e10, 10 * 4 * 2 * 3 * 5e-3  # of two layers and the rest
    assert (flops, calls) == (pytest.approx(96), pytest.approx(1.2))
    assert train_seconds(job(), FOUR) == pytest.approx(97.2)
    assert train_seconds(job(train={"epochs": 3}), FOUR) == pytest.approx(3 * 97.2)
    assert train_seconds(job(train={"steps": 5}), FOUR) == pytest.approx(97.2 / 2)
    assert train_seconds(job(clients={"fraction": 0.5}), FOUR) == pytest.approx(97.2 / 2)
    assert train_seconds(job(train={"gradient_accumulation": 2}), FOUR) == pytest.approx(97.2)
    budget = job(train={"batch_size": 8, "tokens_per_batch": None})
    table = budget.train.model_copy(update={"tokens_per_batch": 500})
    assert train_seconds(budget.model_copy(update={"train": table}), FOUR) == pytest.approx(97.2)


def test_many_steps_of_a_tiny_model_are_worth_workers() -> None:
    tiny = Parts(tuple(replace(part, linear=(1,) if part.linear else ()) for part in PARTS.each), "layers", 0, 64)
    work = Work({f"client-{i}": 16 for i in range(100)}, tokens=10.0, parts=tiny)
    found = [choose(job(clients={"count": 100}, method={"rounds": rounds}), work).name for rounds in (1, 2)]
    assert found == ["inprocess", "pool"], "200 and 400 steps of 15 ms"


RULE: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, int, int]]] = [
    ("two cores", {}, {"cores": 2}, ("pool", 2, 1)),
    ("as many threads as do not wait", {}, {"cores": 9}, ("pool", 4, 2)),
    ("more clients than cores", {"clients": {"count": 4}}, {"cores": 3}, ("pool", 3, 1)),
    ("sampled clients", {"clients": {"fraction": 0.5}}, {"cores": 4}, ("pool", 2, 2)),
    ("one sampled", {"clients": {"fraction": 0.25}}, {"cores": 4}, ("inprocess", 1, 4)),
    ("one core", {}, {"cores": 1}, ("inprocess", 1, 1)),
    ("not on Linux", {}, {"cores": 4, "fork": False}, ("inprocess", 1, 1)),
    ("one client at a time", {"method": {"name": "centralized"}}, {"cores": 4}, ("inprocess", 1, 4)),
    ("one after another", {"method": {"name": "fedbert"}}, {"cores": 4}, ("inprocess", 1, 4)),
    ("threads of the job's", {"engine": {"threads": 2}}, {"cores": 4}, ("pool", 2, 2)),
    ("more threads than cores", {"engine": {"threads": 8}}, {"cores": 4}, ("inprocess", 1, 8)),
    ("workers of the job's", {"engine": {"workers": 3}}, {"cores": 4}, ("pool", 3, 1)),
    ("one worker", {"engine": {"workers": 1}}, {"cores": 4}, ("inprocess", 1, 1)),
    ("more workers than clients", {"engine": {"workers": 50}}, {"cores": 4}, ("pool", 4, 1)),
    ("a pool of one", {"engine": {"name": "pool", "workers": 1}}, {"cores": 4}, ("pool", 1, 1)),
    ("one process", {"engine": {"name": "inprocess"}}, {"cores": 4}, ("inprocess", 1, 1)),
    ("a pool, however short", {"engine": {"name": "pool"}, "train": {"steps": 1}}, {}, ("pool", 2, 1)),
]


@pytest.mark.parametrize(("what", "tables", "on", "wanted"), RULE, ids=[row[0] for row in RULE])
def test_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    tables: dict[str, Any],
    on: dict[str, Any],
    wanted: tuple[str, int, int],
) -> None:
    machine(monkeypatch, **{"cores": 2, **on})
    found = choose(job(**tables), FOUR)
    assert (found.name, found.workers, found.threads) == wanted
    again = choose(job(**tables), FOUR, found.threads)
    assert (again.name, again.workers, again.threads) == wanted, "a run that goes on"


def test_what_leaves_no_place_for_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(job(engine={"threads": 2}), FOUR).why == "no cores for two workers"
    machine(monkeypatch, cores=1)
    assert choose(job(), FOUR).why == "one core", "there is memory for many"


def test_workers_must_save_some_seconds() -> None:
    """With two workers and one thread half of the training."""
    some = [replace(FOUR, tokens=tokens) for tokens in (15.0, 25.0)]
    saved = [train_seconds(job(train={"steps": 1}), work) / 2 for work in some]
    assert saved[0] < START < saved[1]
    found = [choose(job(train={"steps": 1}), work) for work in some]
    assert [each.name for each in found] == ["inprocess", "pool"]
    assert found[0].line == "inprocess, 1 thread (too little to train for workers to pay)"
    assert found[1].line == "pool, 2 workers × 1 thread (4 clients train side by side)"


def test_what_is_saved_depends_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 threads for each of two clients, a client is done sooner, so that less is saved."""
    machine(monkeypatch, cores=16)
    two = job(clients={"fraction": 0.5}, train={"steps": 3})
    assert train_seconds(two, FOUR) * 0.5 / 8 < START < train_seconds(two, FOUR) * 0.5
    assert choose(two, FOUR).name == "inprocess"


def test_memory_bounds_workers_and_threads_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LIBRARIES + 12 * sum(part.elements for part in PARTS.each)
    each = worker_bytes(job(), FOUR)
    assert each > LIBRARIES
    for room, wanted in ((2.0, ("pool", 2, 2)), (1.99, ("inprocess", 1, 4)), (0.0, ("inprocess", 1, 4))):
        machine(monkeypatch, cores=4, gigabytes=(own + room * each + 1) / 0.75 / 1e9)
        found = choose(job(), FOUR)
        assert (found.name, found.workers, found.threads) == wanted
    assert found.why == "not enough memory for two workers"


def test_the_threads_of_a_run_stay_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = choose(job(), FOUR)
    machine(monkeypatch, cores=8)
    assert choose(job(), FOUR).threads == 2
    assert choose(job(), FOUR, begun.threads) == Choice("pool", 4, 1, "4 clients train side by side")


def test_a_gpu_is_a_worker() -> None:
    assert choose(job(), replace(FOUR, gpus=3)).workers == 3
    assert choose(job(), replace(FOUR, gpus=1)).line.endswith("(one GPU)")
    assert choose(job(engine={"workers": 1}), replace(FOUR, gpus=3)).workers == 1


POOL: dict[str, Any] = {"engine": {"name": "pool"}}


@pytest.mark.parametrize(
    ("gpus", "room", "cores", "wanted"),
    [
        (1, 5.0, 64, (4, 16)),
        (1, 4.99, 64, (3, 21)),
        (1, 2.0, 64, (1, 64)),
        (1, 0.5, 64, (1, 64)),
        (1, 99.0, 64, (4, 16)),  # no more than take turns
        (2, 99.0, 64, (8, 8)),
        (2, 99.0, 3, (3, 1)),  # as many as have a core
        (8, 99.0, 3, (8, 1)),  # one on each in any case
        (16, 99.0, 64, (10, 6)),  # as many as have a client
    ],
)
def test_the_workers_of_a_pool_share_gpus_as_far_as_their_memory_reaches(
    monkeypatch: pytest.MonkeyPatch, gpus: int, room: float, cores: int, wanted: tuple[int, int]
) -> None:
    """One more than so many workers have room on a GPU: the first also has the program's own model."""
    machine(monkeypatch, cores=cores)
    ten = replace(FOUR, examples={f"client-{i}": 95 for i in range(10)})
    each = worker_bytes(job(), ten) - LIBRARIES + CONTEXT
    work = replace(ten, gpus=gpus, gpu_memory=int(room * each / 0.75) + 1)
    found = choose(job(**POOL), work)
    assert (found.name, found.workers, found.threads) == ("pool", *wanted)
    assert choose(job(), work).threads == found.threads, "whatever plays the clients"
    assert choose(job(), work).workers == min(gpus, 10), "not measured, so not the default"


def test_workers_on_gpus_need_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = LIBRARIES + CONTEXT + 12 * sum(part.elements for part in PARTS.each)
    work = replace(FOUR, gpus=2, gpu_memory=10**12)
    for room, workers in ((4.0, 4), (3.99, 3), (0.5, 2)):
        machine(monkeypatch, cores=64, gigabytes=(room * here + 1) / 0.75 / 1e9)
        assert choose(job(**POOL), work).workers == workers


@pytest.mark.parametrize(
    ("engine", "names", "line"),
    [
        ({}, ["H100"], "inprocess, 1 thread on H100 (one GPU)"),
        ({"name": "inprocess"}, ["H100", "T4"], "inprocess, 1 thread on H100 (as the job says)"),
        ({}, ["H100", "T4"], "pool, 2 workers × 1 thread on H100, T4 (4 clients train side by side)"),
        ({"name": "pool"}, ["H100"] * 2, "pool, 4 workers × 1 thread on 2 × H100 (as the job says)"),
    ],
)
def test_a_run_names_the_gpus_that_it_trains_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: dict[str, Any], names: list[str], line: str
) -> None:
    machine(monkeypatch, cores=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=10**11))
    data: Any = SimpleNamespace(
        shards={client: np.arange(95) for client in FOUR.examples},
        train=SimpleNamespace(columns={"text": ["a kidney " * 20]}),
    )
    found = choose_engine(job(engine=engine, train={"device": "cuda"}), data, PARTS, tmp_path, Components())
    assert found.line == line


def test_a_pool_of_processes_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=4, fork=False)
    with pytest.raises(UserError, match=r"^\[engine\] name: 'pool' makes its workers on Linux alone"):
        choose(job(engine={"name": "pool"}), FOUR)


RAY: dict[str, Any] = {"name": "pool", "address": "head:6379"}


def test_on_a_cluster_its_cores_count_and_not_those_here(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=64, fork=False)
    found = choose(job(engine=RAY), replace(FOUR, cluster=3))
    assert found.line == "pool, 3 workers × 1 thread (on a Ray cluster, head:6379)"
    assert choose(job(engine={**RAY, "threads": 2}), replace(FOUR, cluster=9)).workers == 4
    assert choose(job(engine={**RAY, "threads": 2}), replace(FOUR, cluster=5)).workers == 2
    assert choose(job(engine=RAY), replace(FOUR, cluster=9), 2).threads == 2, "as its run began"
    assert choose(job(engine=RAY, method={"name": "centralized"}), FOUR).name == "inprocess"
    assert choose(job(engine=RAY), replace(FOUR, cluster=2, gpus=1)).workers == 2


@pytest.mark.parametrize(("table", "cluster"), [({}, 0), ({"workers": 4}, 3), ({"threads": 4}, 3)])
def test_a_cluster_that_is_too_small(table: dict[str, Any], cluster: int) -> None:
    with pytest.raises(UserError, match=rf"^\[engine\] workers: the Ray cluster has {cluster} CPUs, which"):
        choose(job(engine={**RAY, **table}), replace(FOUR, cluster=cluster))
