"""The engine of a stage whose clients are here: which one, and how it is built."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedstrata.client.answer import ClientData
from fedstrata.client.scorer import Keep, scores_by_pool
from fedstrata.client.setup import Ready
from fedstrata.data.prepare import Prepared, population
from fedstrata.data.rows import text_columns
from fedstrata.engines.choice import Choice, Work, choose, side_by_side
from fedstrata.engines.pool import PoolEngine, Workers
from fedstrata.engines.processes import Nursery, Processes
from fedstrata.engines.ray_cluster import RayWorkers, cluster_size, connect
from fedstrata.engines.seed import NotPortableError, Seed
from fedstrata.errors import UserError
from fedstrata.events import Event
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.job.toml import read_toml
from fedstrata.methods.centralized import Centralized
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.runs.components import Components
from fedstrata.tasks.task import is_spread

SEEN = 1000
"""Rows whose length is looked at before they are tokenized."""
LETTERS = 4
"""Letters of a token, about."""


def choose_engine(job: Job, data: Prepared, parts: Parts, folder: Path, own: Components) -> Choice:
    """The engine of a stage: by its job and this machine, with the threads that its run began with.

    Args:
        job: the stage's job, its device resolved.
        data: its rows.
        parts: the model's parts.
        folder: its output folder.
        own: objects of the caller's own.
    """
    shards = population(job.method.population, data.shards)
    each, tokens = _reckoned(job, data)
    gpus = torch.cuda.device_count() if job.train.device == "cuda" else 0
    work = Work(
        examples={client: each * len(rows) for client, rows in shards.items()},
        tokens=tokens,
        parts=parts,
        gpus=gpus,
        gpu_memory=min((torch.cuda.get_device_properties(i).total_memory for i in range(gpus)), default=0),
        cluster=_cluster(job, len(shards)),
    )
    began = recorded_threads(folder) if job.engine.threads == "auto" else None
    choice = choose(job, work, began)
    if choice.name == "pool" and job.engine.name == "auto" and (own.task or own.codec):
        choice = Choice("inprocess", 1, choice.threads, "task or codec of the caller's own")
    return replace(choice, gpus=_named(job, choice, gpus)) if gpus else choice


def _named(job: Job, choice: Choice, gpus: int) -> str:
    """The GPUs that a choice trains on, in words."""
    if choice.name == "pool" and job.engine.address is not None:
        return "a GPU each"
    used = min(gpus, choice.workers)  # one process takes the first
    names = Counter(torch.cuda.get_device_name(i) for i in range(used))
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())


def _reckoned(job: Job, data: Prepared) -> tuple[int, float]:
    """Examples that a row makes, which are several where long texts are not truncated, and tokens of each."""
    texts, kind = [data.train.columns[name][:SEEN] for name in text_columns(job)], TASK_KINDS[job.task.kind]
    tokens = sum(len(text) for column in texts for text in column) / max(1, len(texts[0])) / LETTERS + 2
    pair = bool(kind.texts) and len(texts) > 1
    whole = pair or (job.data.long_text or kind.long_text) == "truncate"
    each = 1 if whole else math.ceil(tokens / job.train.max_tokens)
    return each, min(job.train.max_tokens, tokens / each)


def _cluster(job: Job, clients: int) -> int:
    """CPUs, or GPUs, of the Ray cluster that the job names; 0 where it names none, or needs none."""
    if job.engine.address is None or side_by_side(job, clients) < 2:
        return 0
    return cluster_size(job.engine.address, "GPU" if job.train.device == "cuda" else "CPU")


def recorded_threads(folder: Path) -> int | None:
    """The threads that a folder's run began with; None if there is none, or it says nothing of them."""
    path = folder / "job.toml"
    found = read_toml(path).get("engine", {}).get("threads") if path.exists() else None
    return found if isinstance(found, int) else None


def with_choice(job: Job, choice: Choice) -> Job:
    """The job with its engine settled."""
    pool = choice.name == "pool"
    table: dict[str, Any] = {"name": choice.name, "threads": choice.threads, "workers": choice.workers}
    if not pool:
        table |= {"workers": "auto", "address": None}
    return job.model_copy(update={"engine": job.engine.model_copy(update=table)})


def worker_modules(job: Job, architecture: str) -> list[str]:
    """What all workers of a pool import beside what every run does.

    Args:
        job: the stage's job.
        architecture: of the model, in Hugging Face's configs.
    """
    name = architecture.replace("-", "_")
    own_scores = ["seqeval.metrics"] if job.clients.test is not None and TASK_KINDS[job.task.kind].words else []
    # on a GPU machine peft may ask for the GPUs, which a process that is to be forked must not
    adapters = ["peft"] if job.adapter.kind == "lora" and job.train.device == "cpu" else []
    return [f"transformers.models.{name}.modeling_{name}", *own_scores, *adapters]


@contextmanager
def threads_set(threads: int | str) -> Iterator[None]:
    """Inside, torch computes with so many threads; with ``auto`` as before."""
    before = torch.get_num_threads()
    if isinstance(threads, int):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def pool_engine(
    job: Job,
    ready: Ready,
    data: Mapping[str, ClientData],
    shared: dict[str, tuple[int, Tensors]],
    nursery: Nursery,
    tell: Callable[[Event], None],
    folder: Path,
) -> Iterator[PoolEngine]:
    """The engine ``pool`` over workers that are ended with it.

    Args:
        job: the stage's job, its engine settled.
        ready: its model and examples.
        data: client -> what it has.
        shared: part -> version and tensors that clients begin with.
        nursery: makes worker processes.
        tell: receives events.
        folder: the stage's output folder.

    Raises:
        UserError: no Ray cluster answers, or an object of the caller's own cannot be brought to a worker.
    """
    seed = Seed(
        job=job if job.privacy.sum_only else job.model_copy(update={"method": Centralized()}),
        config=ready.loaded.model.config,
        buffers={name: buffer.cpu() for name, buffer in ready.loaded.model.named_buffers()},
        parts=replace(ready.loaded.parts),  # without what it remembers of plans, which a worker never makes
        task=ready.runtime.trainer.task,
        codec=ready.runtime.wire.codec,
        exchange=job.method.exchange,
        train=ready.train,
        test=ready.test,
    )
    threads, count = job.engine.threads, job.engine.workers
    assert isinstance(threads, int)
    assert isinstance(count, int)
    try:
        workers: Workers
        gpus = torch.cuda.device_count() if job.train.device == "cuda" else 0
        if job.engine.address is None:
            workers = Processes(nursery, seed, threads, gpus)
        else:
            workers = RayWorkers(connect(job.engine.address), seed, threads, gpus > 0, folder)
    except NotPortableError as error:
        raise UserError(
            f"[engine] name: 'pool' needs what a worker can load by itself, but {error}; expected 'inprocess'"
        ) from None
    try:
        yield PoolEngine(workers, count, data, shared, ready.runtime.wire, job.train, tell)
    finally:
        workers.close()


def spread_score(
    engine: PoolEngine, ready: Ready, plan: Plan, weights: Mapping[str, tuple[object, Tensors]], keep: Keep
) -> dict[str, float]:
    """As :meth:`fedstrata.client.scorer.Scorer.run`, over all test examples, by the workers of a pool."""
    task = ready.runtime.scorer.task
    assert is_spread(task)

    def score(chosen: Index) -> dict[str, float]:
        found = engine.predictions(plan, weights, chosen)
        keep(chosen, found)
        return task.metrics(found)

    return scores_by_pool(ready.test, None, score)
