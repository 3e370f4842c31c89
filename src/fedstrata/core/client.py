"""A client: what it is asked, what it does, what it answers. The same code on every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.parts import Parts, Tensors, tensors
from fedstrata.core.plan import Plan
from fedstrata.core.rng import SERVER, Streams
from fedstrata.core.store import Store
from fedstrata.cost.flops import Positions, encoder_flops, train_flops
from fedstrata.nn.batching import Index, batches
from fedstrata.nn.depth import local_depth
from fedstrata.nn.features import Kept, Received, message
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.wire.tensors import carry

Weights = dict[str, Tensors]
"""Part -> its tensors."""

Tagged = Mapping[str, tuple[object, Tensors]]
"""Part -> (tag, its tensors): equal tags of a part mean equal tensors."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one client.

    Attributes:
        round: 0-based round.
        client: the client's name.
        plan: what to build, train, send and keep.
        phase: ``train``, ``evaluate``, or ``features``: to send what the encoder makes of the client's texts.
        first: the client has not trained before, so what it computes once is counted now.
        versions: the version of every shared part that the plan needs.
        parts: those of them that the client lacks, as they travel.
    """

    round: int
    client: str
    plan: Plan
    phase: str
    versions: dict[str, int]
    parts: Weights
    first: bool = False


@dataclass(frozen=True)
class Reply:
    """What a client answers.

    Attributes:
        client: its name.
        examples: number of its training examples: its weight in the mean.
        weights: the parts sent, as they travel; in phase ``features`` those, under that name.
        loss: mean over the steps of the round, without the proximal term.
        steps: optimiser steps made.
        work: positions computed with.
        flops: of the training steps, by :func:`fedstrata.cost.flops.train_flops`.
        seconds: clock time of the client's work.
        scores: in phase ``evaluate``, the client's model on its test rows; by client where it is scored on several
            clients' own.
    """

    client: str
    examples: int
    weights: Weights = field(default_factory=dict)
    loss: float = float("nan")
    steps: int = 0
    work: Positions = field(default_factory=Positions)
    flops: int = 0
    seconds: float = 0.0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """How a client trains: the job's ``[train]`` with every "auto" settled.

    Attributes:
        decay: the learning rate is multiplied by it after every epoch.
        width: pad every batch to so many tokens; None pads to its longest text.
        features: bytes that may be kept on disk of what a frozen encoder makes of a client's texts.
        by_length: batches of texts of like length.
        bf16: compute in bf16 where autocast allows; weights and optimiser stay fp32.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 5e-5
    decay: float = 1.0
    weight_decay: float = 0.01
    proximal_mu: float = 0.0
    device: str = "cpu"
    bf16: bool = False
    by_length: bool = True
    width: int | None = None
    features: int = 0


Told = Callable[[int, int, float, int], None]
"""Called after every step with: steps made, steps of the round, the step's loss, examples seen."""


class Worker:
    """One model that plays every client in turn: weights are swapped in, nothing is rebuilt."""

    def __init__(self, model: Any, parts: Parts, task: Task, local: Local, streams: Streams) -> None:
        self.model = model.to(local.device)
        self.parts = parts
        self.task = task
        self.local = local
        self.streams = streams
        self.tags: dict[str, object] = {}
        self.frozen: dict[Path, Kept] = {}
        self.encoded: Callable[[int, int], None] = lambda done, total: None

    def load(self, weights: Tagged) -> None:
        """Put weights into the model; a part that is there already, by its tag, is not copied again."""
        for part, (tag, new) in weights.items():
            if tag is None or self.tags.get(part) != tag:
                for name, own in tensors(self.model, self.parts, [part]).items():
                    own.copy_(new[name])
                self.tags[part] = tag

    def train(
        self,
        plan: Plan,
        round: int,
        client: str,
        examples: Examples,
        index: Index,
        told: Told,
        first: bool = False,
        kept: Kept | Received | None = None,
    ) -> Reply:
        """One client's training in one round, on the examples at ``index``, from the weights loaded before.

        Args:
            plan: what to train.
            round: the round.
            client: the client's name.
            examples: all examples.
            index: the client's own among them.
            told: called after every step.
            first: it has not trained before.
            kept: what a frozen encoder makes of them.
        """
        started = time.perf_counter()
        trained = self._trainable(plan)
        near = [(p, p.detach().clone()) for name, p in trained.items() if self._shared(plan, name)]
        near = near if self.local.proximal_mu else []
        optimiser = _optimiser(trained, self.local)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, self.local.decay)
        epoch = -(-len(index) // self.local.batch_size)
        losses, work, seen = [], Positions(), 0
        for part in plan.train:
            self.tags[part] = None  # no longer what was loaded
        cuda = [self.model.device] if self.model.device.type == "cuda" else []
        self.model.train()
        encoded = [kept.stored] if kept and first else []
        with torch.random.fork_rng(cuda), local_depth(self.model, self.parts, plan.layers):
            torch.manual_seed(self.streams.integer(round, client, "dropout"))
            for total, chosen, batch in self._batches(round, client, examples, index):
                if kept:
                    batch = replace(batch, inputs=kept.inputs(chosen)).to(self.model.device)
                    encoded.append(kept.missing(chosen))
                losses.append(self._step(batch, optimiser, near))
                if len(losses) % epoch == 0:
                    schedule.step()
                work += batch.work
                seen += len(chosen)
                told(len(losses), total, losses[-1], seen)
        return Reply(
            client=client,
            examples=len(index),
            loss=float(np.mean(losses)),
            steps=len(losses),
            work=work,
            flops=train_flops(self.parts, plan, work)
            + sum(encoder_flops(self.parts, lengths) for lengths in encoded),
            seconds=time.perf_counter() - started,
        )

    def score(self, examples: Examples, only: Index | None = None, folder: Path | None = None) -> dict[str, float]:
        """The loaded model on all ``examples`` or ``only`` some, by the task's metrics; always the same masks.

        Of each pool of the examples the same again, as ``METRIC.POOL``. ``folder`` is given where the encoder
        stays as it is: what it makes of the texts is kept there.
        """
        chosen = np.arange(len(examples)) if only is None else only
        kept = self.kept(examples, chosen, folder) if folder else None
        made = self._score(examples, chosen, kept)
        for pool, members in examples.pools.items():
            if len(inside := np.intersect1d(chosen, members)):
                scores = self._score(examples, inside, kept)
                made |= {f"{metric}.{pool}": value for metric, value in scores.items()}
        return made

    def _score(self, examples: Examples, chosen: Index, kept: Kept | None) -> dict[str, float]:
        rng = self.streams.numpy(-1, SERVER, "evaluate")
        made = batches(examples.tokens.lengths[chosen], 2 * self.local.batch_size, None)
        self.model.eval()

        def batch(some: Index) -> Batch:
            plain = self.task.batch(examples, some, rng)
            return (replace(plain, inputs=kept.inputs(some)) if kept else plain).to(self.model.device)

        with torch.inference_mode(), self._autocast():
            return self.task.score(self.model, (batch(chosen[index]) for index in made))

    def kept(self, examples: Examples, index: Index, folder: Path) -> Kept:
        """What the frozen encoder makes of some examples, kept in a folder; made once."""
        if folder not in self.frozen:
            self.frozen[folder] = Kept(self.model, self.task, self.local, examples, index, folder, self.encoded)
        return self.frozen[folder]

    def _batches(
        self, round: int, client: str, examples: Examples, index: Index
    ) -> Iterator[tuple[int, Index, Batch]]:
        """The batches of one round and their examples, each with the number of them all."""
        order = self.streams.numpy(round, client, "order")
        draw = self.streams.numpy(round, client, "batch")
        for total, positions in steps(examples.tokens.lengths[index], self.local, order):
            batch = self.task.batch(examples, index[positions], draw, self.local.width)
            yield total, index[positions], batch.to(self.model.device)

    def _step(
        self,
        batch: Batch,
        optimiser: torch.optim.Optimizer,
        near: list[tuple[torch.nn.Parameter, torch.Tensor]],
    ) -> float:
        with self._autocast():
            loss = self.task.loss(self.model, batch)
        torch.autograd.backward(loss)
        for parameter, old in near:  # the gradient of mu/2 |w - w_t|^2, FedProx's term (Li et al. 2020, eq. 2)
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - old, alpha=self.local.proximal_mu)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.local.bf16)

    def _trainable(self, plan: Plan) -> dict[str, torch.nn.Parameter]:
        """Freeze everything else: below the lowest trained part autograd then builds no graph."""
        names = {name for part in plan.train for name in self.parts.shapes[part]}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in names)
        return {name: p for name, p in self.model.named_parameters() if name in names}

    def _shared(self, plan: Plan, name: str) -> bool:
        return any(name in self.parts.shapes[part] for part in plan.send)


def steps(lengths: Index, local: Local, order: np.random.Generator) -> Iterator[tuple[int, Index]]:
    """One round of a client: the number of its steps, with each of them, and the positions of each batch.

    Args:
        lengths: tokens of each of the client's examples, ``[n]``.
        local: how it trains.
        order: makes the batches, epoch by epoch.
    """
    total = local.epochs * -(-len(lengths) // local.batch_size)
    total = min(total, local.steps or total)
    made = 0
    for _ in range(local.epochs):
        for positions in batches(lengths, local.batch_size, order, local.by_length)[: total - made]:
            made += 1
            yield total, positions


def handle(
    worker: Worker,
    request: Request,
    shared: Tagged,
    examples: Examples,
    index: Index,
    tests: Mapping[str, Index] | None,
    store: Store,
    dtype: str,
    told: Told,
) -> Reply:
    """Answer a request: load, train or evaluate, keep, send. The same on every engine.

    Args:
        worker: the model to play the client with.
        request: what is asked.
        shared: the shared parts the client holds, the request's own included, fp32.
        examples: training examples (phase ``train``) or test examples (phase ``evaluate``).
        index: the client's own among the training examples.
        tests: whose test examples to be scored on -> those; None for all.
        store: the client's own disk, for the parts it keeps.
        dtype: the wire type of what is sent.
        told: called after every step.
    """
    started = time.perf_counter()
    plan, parts = request.plan, worker.parts
    before = request.round + (request.phase == "evaluate")
    kept = store.load(before) if plan.keep else {}
    mine = {
        part: (None, {name: kept[name] for name in parts.shapes[part]}) if kept else shared[part]
        for part in plan.keep
    }
    worker.load({**{part: shared[part] for part in request.versions}, **mine})
    if request.phase == "evaluate":
        on: Mapping[str, Index | None] = tests or {request.client: None}
        folders = {name: store.folder / f"test-features-{name}" if plan.features else None for name in on}
        scores = {name: worker.score(examples, only, folders[name]) for name, only in on.items()}
        return Reply(request.client, len(index), scores=scores, seconds=time.perf_counter() - started)
    states = worker.kept(examples, index, store.folder / "features") if plan.features else None
    if request.phase == "features":
        assert states is not None
        return Reply(
            request.client,
            len(index),
            weights={"features": message(states, index, dtype)},
            flops=encoder_flops(parts, states.stored) + encoder_flops(parts, states.missing(index)),
            seconds=time.perf_counter() - started,
        )
    reply = worker.train(plan, request.round, request.client, examples, index, told, request.first, states)
    if plan.keep:
        store.save(request.round, tensors(worker.model, parts, plan.keep))
    rest, sent = store.rest.load(request.round), {}
    for part in plan.send:
        leaving, left = carry(tensors(worker.model, parts, [part]), dtype, rest)
        sent[part] = {name: tensor.to("cpu", copy=True) for name, tensor in leaving.items()}
        rest.update(left)
    if rest:
        store.rest.save(request.round, rest)
    return replace(reply, weights=sent)


def _optimiser(trained: Mapping[str, torch.nn.Parameter], local: Local) -> torch.optim.Optimizer:
    """AdamW over what is trained, anew in every round; biases and norms do not decay."""
    decayed = [p for p in trained.values() if p.ndim > 1]
    rest = [p for p in trained.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": local.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=local.learning_rate, fused=True)
