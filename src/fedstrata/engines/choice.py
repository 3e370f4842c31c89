"""Which engine runs a job's clients, with how many workers and threads: fixed rules, never a measurement.

The threads of a client decide about the last bits of a run, so they follow from the machine and the job alone, and
stay what they were when the run is resumed. Engine and workers change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedstrata.engines.machine import can_fork, cores, memory
from fedstrata.errors import UserError, plural
from fedstrata.job.tables import Job
from fedstrata.plan.kinds import LANGUAGE
from fedstrata.plan.parts import Parts
from fedstrata.plan.schedule import round_half_up

RATE = 5e10
"""FLOPs per second and core that training is reckoned with."""
DISPATCH = 5e-3
"""Seconds of a step for each layer, and once more for the rest, however small: calls of operators, on one core."""
START = 2.0
"""Seconds by which workers must shorten a run's training to be started: they take memory."""
LIBRARIES = 300_000_000
"""Bytes of a worker's own beside its model: what torch and the others take that is not shared."""
CONTEXT = 1_000_000_000
"""Bytes that CUDA and its libraries take for each worker: of its GPU, and as many of the machine's memory."""
TURNS = 4
"""Most workers on a GPU. They take turns there: one fills the pauses in which others make their next batches and
calls, most of a small model's steps. More than a few would only wait for each other. Four took 0.72 of the time to
train ten clients of BERT-base on one H200, measured once."""
HEAD_WIDTH = 32
"""Width of an attention head, at the least."""
ONE = "one client trains at a time"
USABLE = 0.75
"""Share of the memory that workers may take together."""


@dataclass(frozen=True)
class Work:
    """What is known of a stage's training before its rows are tokenized.

    Attributes:
        examples: client -> its training examples: rows, or the chunks that long ones are cut into.
        tokens: of an example, on average; ``train.max_tokens`` at most.
        parts: the model's.
        gpus: GPUs that the job's device means; 0 on the CPU.
        gpu_memory: bytes of the smallest of them.
        cluster: CPUs, or GPUs if the job's device is one, of the Ray cluster that the job names.
    """

    examples: Mapping[str, int]
    tokens: float
    parts: Parts
    gpus: int = 0
    gpu_memory: int = 0
    cluster: int = 0


@dataclass(frozen=True)
class Choice:
    """How the clients are played.

    Attributes:
        name: ``inprocess`` or ``pool``.
        workers: processes; 1 in process.
        threads: of each.
        why: in a few words.
        gpus: the names of those that they train on, in words; empty on the CPU.
    """

    name: str
    workers: int
    threads: int
    why: str
    gpus: str = ""

    @property
    def line(self) -> str:
        """The choice in a sentence."""
        workers = f"{plural(self.workers, 'worker')} × " if self.name == "pool" else ""
        where = f" on {self.gpus}" if self.gpus else ""
        return f"{self.name}, {workers}{plural(self.threads, 'thread')}{where} ({self.why})"


def choose(job: Job, work: Work, threads: int | None = None) -> Choice:
    """The engine of a stage whose clients are on this machine.

    Args:
        job: the stage's job.
        work: what is known of its training.
        threads: with which the run began; None for one that begins now.

    Raises:
        UserError: the job's engine or its number of workers is not to be had here.
    """
    table, sampled = job.engine, side_by_side(job, len(work.examples))
    fitting = on_gpus(job, work) if work.gpus else min(cores(), _fitting(job, work))
    together = max(1, min(sampled, fitting))
    cluster = table.address is not None and sampled > 1
    if threads is None:
        own = 1 if cluster else max(1, cores() // together)
        threads = own if table.threads == "auto" else table.threads
    if cluster:
        return _on_cluster(job, work, sampled, threads)
    if table.name == "pool" and table.address is None and not can_fork():
        raise UserError("[engine] name: 'pool' makes its workers on Linux alone; expected 'inprocess'")
    if table.name == "inprocess":
        return Choice("inprocess", 1, threads, "as the job says")
    if sampled < 2:
        return Choice("inprocess", 1, threads, ONE)
    most = min(sampled, max(1, cores() // threads), fitting)
    if work.gpus:
        most = min(sampled, fitting if table.name == "pool" else work.gpus)
    workers = most if table.workers == "auto" else min(table.workers, sampled)
    if table.name == "pool":
        return Choice("pool", workers, threads, "as the job says")
    if workers < 2 or not can_fork():
        return Choice("inprocess", 1, threads, _why_one(work, threads, _fitting(job, work)))
    saved = train_seconds(job, work) * (1 - 1 / workers) / threads
    if saved < START:
        return Choice("inprocess", 1, threads, "too little to train for workers to pay")
    return Choice("pool", workers, threads, f"{sampled} clients train side by side")


def _on_cluster(job: Job, work: Work, sampled: int, threads: int) -> Choice:
    """Workers on a Ray cluster; a client has one thread there by default, whatever machines the cluster has."""
    place = work.cluster if work.gpus else work.cluster // threads
    workers = min(sampled, place if job.engine.workers == "auto" else job.engine.workers)
    if not 1 <= workers <= place:
        has = plural(work.cluster, "GPU" if work.gpus else "CPU")
        raise UserError(
            f"[engine] workers: the Ray cluster has {has}, which is too little for "
            f"{plural(max(1, workers), 'worker')} of {plural(threads, 'thread')}"
        )
    return Choice("pool", workers, threads, f"on a Ray cluster, {job.engine.address}")


def side_by_side(job: Job, clients: int) -> int:
    """How many clients of a round can train at the same time: all that are sampled, or one."""
    method = job.method
    if method.exchange != "weights" or method.client_schedule != "parallel" or method.population != "each":
        return 1
    return max(1, round_half_up(job.clients.fraction * clients))


def train_seconds(job: Job, work: Work) -> float:
    """Seconds that one core is reckoned to train: 6 FLOPs per weight and token, and what a step costs anyway."""
    train, sizes = job.train, list(work.examples.values())
    texts = train.gradient_accumulation * _batch_texts(job, work.tokens)  # of a step
    steps = [train.epochs * math.ceil(size / texts) for size in sizes]
    if train.steps:
        steps = [min(train.steps, own) for own in steps]
    count = sum(steps) * job.clients.fraction * job.method.rounds
    weights = sum(sum(part.linear) for part in work.parts.each if part.kind == "layer")
    passes = train.gradient_accumulation * DISPATCH * (work.parts.depth + 1)
    return count * (6 * weights * texts * work.tokens / RATE + passes)


def _batch_texts(job: Job, tokens: float) -> int:
    """Texts of so many tokens in a batch."""
    budget = job.train.tokens_per_batch
    return job.train.batch_size if budget is None else max(1, math.ceil(budget / tokens))


def worker_bytes(job: Job, work: Work) -> int:
    """Memory that a worker is reckoned to take at most: weights, gradients, moments, a reply, a batch's states.

    For the backward pass a layer keeps about 100 bytes per token and element of its width, and 12 per head and
    pair of tokens; a language model's head 12 per predicted token and word. :mod:`fedstrata.models.memory` counts
    such things exactly, but takes a second to do so.
    """
    train, parts = job.train, work.parts
    elements = sum(part.elements for part in parts.each)
    width, heads = train.max_tokens, max(1, parts.hidden // HEAD_WIDTH)
    vocabulary = max(shape[0] for shape in parts["embeddings"].shapes.values())
    predicted = width if job.task.kind == "clm" or train.mlm_head == "full" else math.ceil(0.15 * width)
    layer = width * (100 * parts.hidden + 12 * heads * width)
    head = 12 * predicted * vocabulary if job.task.kind in LANGUAGE else 0
    return LIBRARIES + 24 * elements + _batch_texts(job, width) * (parts.depth * layer + head)


def _fitting(job: Job, work: Work) -> int:
    """Workers that the memory is enough for, beside the server's own 12 bytes per weight."""
    own = LIBRARIES + 12 * sum(part.elements for part in work.parts.each)
    return max(1, int((USABLE * memory() - own) // worker_bytes(job, work)))


def on_gpus(job: Job, work: Work) -> int:
    """Workers for the GPUs: one each, and more as far as their memory, the machine's and its cores reach.

    A place on each is left free: on the first this program has a model of its own.
    """
    elements = sum(part.elements for part in work.parts.each)
    each = worker_bytes(job, work) - LIBRARIES + CONTEXT
    here = int(USABLE * memory() // (LIBRARIES + CONTEXT + 12 * elements))
    sharing = min(TURNS, int(USABLE * work.gpu_memory // each) - 1)
    return max(work.gpus, min(work.gpus * sharing, here, cores()))


def _why_one(work: Work, threads: int, fitting: int) -> str:
    if not can_fork():
        return "not on Linux"
    if work.gpus == 1:
        return "one GPU"
    if cores() < 2:
        return "one core"
    if fitting < 2:
        return "not enough memory for two workers"
    return "no cores for two workers" if cores() < 2 * threads else "one worker asked for"
