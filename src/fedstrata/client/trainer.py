"""A client: what it is asked, what it does, what it answers. The same code on every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.feature_cache import CollectedFeatures, FeatureCache, message
from fedstrata.client.optimizer import Parameters, learning_rate, make_optimizer, memory_of, step
from fedstrata.cost.flops import encoder_flops, train_flops
from fedstrata.data.batching import batches
from fedstrata.job.tables import Train
from fedstrata.models.cut import CutLayer, SplitLink, cut_at
from fedstrata.models.depth import local_depth
from fedstrata.models.parts import part_tensors
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.messages import Positions, Reply, Request, Tagged
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.wire.codec import carry
from fedstrata.wire.store import Store

Result = TypeVar("Result")

StepCallback = Callable[[int, int, float, int], None]
"""Called after every step with: steps made, steps of the round, the step's loss, examples seen."""


class Worker:
    """One model that plays every client in turn: weights are swapped in, nothing is rebuilt."""

    def __init__(
        self, model: Any, parts: Parts, task: Task, train: Train, streams: Streams, dtype: str = "fp32"
    ) -> None:
        self.model = model.to(train.device)
        self.dtype = dtype
        self.parts = parts
        self.task = task
        self.train = train
        self.streams = streams
        self.tags: dict[str, object] = {}
        self.places = _places(model)
        self.thread = ThreadPoolExecutor(1, "client")
        self.frozen: dict[Path, FeatureCache] = {}
        self.encoded: Callable[[int, int], None] = lambda done, total: None

    def load(self, weights: Tagged) -> None:
        """Put weights into the model; a part that is there already, by its tag, is not copied again."""
        for part, (tag, new) in weights.items():
            if tag is None or self.tags.get(part) != tag:
                for name, own in part_tensors(self.model, self.parts, [part]).items():
                    own.copy_(new[name])
                self.tags[part] = tag

    def swap_parameters(self, names: Iterable[str]) -> None:
        """Give parts of the model new parameters, so that whoever holds those it has may go on with them."""
        for part in names:
            new = {name: self.model.get_parameter(name) for name in self.parts.shapes[part]}
            self._set_parameters(
                {name: torch.nn.Parameter(torch.empty_like(p), p.requires_grad) for name, p in new.items()}
            )
            self.tags[part] = None

    def _set_parameters(self, parameters: Parameters) -> None:
        """Make parameters the model's, wherever they stand in it."""
        for name, parameter in parameters.items():
            for module, leaf in self.places[name]:
                setattr(module, leaf, parameter)

    def training(
        self,
        plan: Plan,
        round: int,
        client: str,
        examples: Examples,
        index: Index,
        told: StepCallback,
        first: bool = False,
        kept: FeatureCache | CollectedFeatures | None = None,
        span: tuple[float, float] = (0.0, 1.0),
        memory: Mapping[str, torch.Tensor] = MappingProxyType({}),
        link: SplitLink | None = None,
    ) -> Generator[None, None, tuple[Reply, Tensors]]:
        """One client's training in one round, on the examples at ``index``, from the weights loaded before.

        With a link, others may use the model between the steps, after each of which this yields: what this client
        trains then stands aside, and the rest of its step, which is its own alone, goes on beside theirs.

        Args:
            plan: what to train.
            round: the round.
            client: the client's name.
            examples: all examples.
            index: the client's own among them.
            told: called after every step.
            first: it has not trained before.
            kept: what a frozen encoder makes of them.
            span: the shares of the run's training that are done before and after.
            memory: of the optimizer, from the round before.
            link: the way to the layers that the server holds.

        Returns:
            The reply, and the optimizer's memory where it is kept.
        """
        started = time.perf_counter()
        trained = self._trainable(plan)
        near = [(p, p.detach().clone()) for name, p in trained.items() if self._shared(plan, name)]
        near = near if self.train.proximal_mu else []
        optimizer = make_optimizer(trained, self.train, memory)
        epoch = -(-len(index) // self.train.batch_size)
        losses: list[float] = []
        work, seen = Positions(), 0
        for part in plan.train:
            self.tags[part] = None  # no longer what was loaded
        dice = DropoutRng(self.streams.integer(round, client, "dropout"), self.model.device)
        encoded = [kept.stored] if kept and first else []
        cut = CutLayer(link, self.dtype) if link else None
        rest: Future[None] | None = None
        for total, chosen, batch in self._batches(round, client, examples, index):
            pace = ScheduleSpan(total, epoch, *span)
            if link and not losses:
                link.begin(pace)
            if kept:
                batch = replace(batch, inputs=kept.inputs(chosen)).to(self.model.device)
                encoded.append(kept.missing(chosen))
            if rest:
                rest.result()
                self._set_parameters(trained)
            self.model.train()
            with dice.fork(), self._built(plan, cut):
                losses.append(self._backward(batch, cut))
            rate = learning_rate(self.train, pace, len(losses) - 1)
            if cut:
                below = cut.fetch()
                rest = self.thread.submit(self._step, below, near, optimizer, rate)
            else:
                self._step(None, near, optimizer, rate)
            work += batch.work
            seen += len(chosen)
            told(len(losses), total, losses[-1], seen)
            left = time.perf_counter()
            yield
            started += time.perf_counter() - left  # others' time
        if rest:
            rest.result()
            self._set_parameters(trained)
        reply = Reply(
            client=client,
            examples=len(index),
            loss=float(np.mean(losses)),
            steps=len(losses),
            work=work,
            flops=train_flops(self.parts, plan, work)
            + sum(encoder_flops(self.parts, lengths) for lengths in encoded),
            seconds=time.perf_counter() - started,
        )
        return reply, memory_of(optimizer, trained) if self.train.optimizer_state == "persist" else {}

    def score(
        self,
        examples: Examples,
        only: Index | None = None,
        folder: Path | None = None,
        plan: Plan | None = None,
        link: SplitLink | None = None,
    ) -> dict[str, float]:
        """The loaded model on all ``examples`` or ``only`` some, by the task's metrics; always the same masks.

        Of each pool of the examples the same again, as ``METRIC.POOL``. ``folder`` is given where the encoder
        stays as it is: what it makes of the texts is kept there; ``plan`` and ``link`` where some of the layers
        are the server's.
        """
        chosen = np.arange(len(examples)) if only is None else only
        kept = self.kept(examples, chosen, folder) if folder else None
        cut = CutLayer(link, self.dtype) if link else None
        made = self._score(examples, chosen, kept, plan, cut)
        for pool, members in examples.pools.items():
            if len(inside := np.intersect1d(chosen, members)):
                scores = self._score(examples, inside, kept, plan, cut)
                made |= {f"{metric}.{pool}": value for metric, value in scores.items()}
        return made

    def _score(
        self, examples: Examples, chosen: Index, kept: FeatureCache | None, plan: Plan | None, cut: CutLayer | None
    ) -> dict[str, float]:
        rng = self.streams.numpy(-1, SERVER, "evaluate")
        made = batches(examples.tokens.lengths[chosen], 2 * self.train.batch_size, None)
        self.model.eval()

        def batch(some: Index) -> Batch:
            plain = self.task.batch(examples, some, rng)
            made = (replace(plain, inputs=kept.inputs(some)) if kept else plain).to(self.model.device)
            if cut:
                cut.lengths = made.inputs["attention_mask"].sum(1)
            return made

        built = nullcontext() if plan is None else self._built(plan, cut)
        with torch.inference_mode(), built, self.autocast():
            return self.task.score(self.model, (batch(chosen[index]) for index in made))

    def kept(self, examples: Examples, index: Index, folder: Path) -> FeatureCache:
        """What the frozen encoder makes of some examples, kept in a folder; made once."""
        if folder not in self.frozen:
            self.frozen[folder] = FeatureCache(
                self.model, self.task, self.train, examples, index, folder, self.encoded
            )
        return self.frozen[folder]

    def _batches(
        self, round: int, client: str, examples: Examples, index: Index
    ) -> Iterator[tuple[int, Index, Batch]]:
        """The batches of one round and their examples, each with the number of them all."""
        order = self.streams.numpy(round, client, "order")
        draw = self.streams.numpy(round, client, "batch")
        for total, positions in steps(examples.tokens.lengths[index], self.train, order):
            batch = self.task.batch(examples, index[positions], draw, self.train.width)
            yield total, index[positions], batch.to(self.model.device)

    def _built(self, plan: Plan, cut: CutLayer | None) -> AbstractContextManager[None]:
        """Inside, the model is the plan's local model."""
        if cut is None:
            return local_depth(self.model, self.parts, plan.layers)
        return cut_at(self.model, self.parts, plan, cut)

    def _backward(self, batch: Batch, cut: CutLayer | None) -> float:
        """The loss of a batch; its gradients stand at the parameters, with a cut at those above it."""
        if cut:
            cut.lengths = batch.inputs["attention_mask"].sum(1)
        with self.autocast():
            loss = self.task.loss(self.model, batch)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _step(
        self,
        below: tuple[torch.Tensor, torch.Tensor] | None,
        near: list[tuple[torch.nn.Parameter, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        rate: float,
    ) -> None:
        """The rest of a step: the backward pass from what was sent and its gradient, and the optimizer's."""
        if below and below[0].requires_grad:
            torch.autograd.backward(*below)
        for parameter, old in near:  # the gradient of mu/2 |w - w_t|^2, FedProx's term (Li et al. 2020, eq. 2)
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - old, alpha=self.train.proximal_mu)
        step(optimizer, rate)

    def autocast(self) -> torch.autocast:
        """Inside, matrices are multiplied in bf16 where the job says so."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.train.precision == "bf16")

    def _trainable(self, plan: Plan) -> dict[str, torch.nn.Parameter]:
        """Freeze all else but what is the server's: below the lowest trained part autograd builds no graph."""
        names = {name for part in plan.train for name in self.parts.shapes[part]}
        served = {name for part in plan.server for name in self.parts.shapes[part]}
        for name, parameter in self.model.named_parameters():
            if name not in served:
                parameter.requires_grad_(name in names)
        return {name: p for name, p in self.model.named_parameters() if name in names}

    def _shared(self, plan: Plan, name: str) -> bool:
        return any(name in self.parts.shapes[part] for part in plan.send)


def steps(lengths: Index, train: Train, order: np.random.Generator) -> Iterator[tuple[int, Index]]:
    """One round of a client: the number of its steps, with each of them, and the positions of each batch.

    Args:
        lengths: tokens of each of the client's examples, ``[n]``.
        local: how it trains.
        order: makes the batches, epoch by epoch.
    """
    total = train.epochs * -(-len(lengths) // train.batch_size)
    total = min(total, train.steps or total)
    made = 0
    for _ in range(train.epochs):
        for positions in batches(lengths, train.batch_size, order, train.group_by_length)[: total - made]:
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
    told: StepCallback,
    link: SplitLink | None = None,
) -> Generator[None, None, Reply]:
    """Answer a request: load, train or evaluate, keep, send. The same on every engine.

    It yields after every training step, see :meth:`Worker.training`; :func:`finish` runs through it.

    Args:
        worker: the model to play the client with.
        request: what is asked.
        shared: the shared parts the client holds, the request's own included, fp32.
        examples: training examples (phase ``train``) or test examples (phase ``evaluate``).
        index: the client's own among the training examples.
        tests: whose test examples to be scored on -> those; None for all.
        store: the client's own disk, for the parts it keeps.
        told: called after every step.
        link: the way to the layers that the server holds, where the plan says so.
    """
    started = time.perf_counter()
    plan, parts, dtype = request.plan, worker.parts, worker.dtype
    before = request.round + (request.phase == "evaluate")
    kept = store.load(before) if plan.keep else {}
    mine = {
        part: (None, {name: kept[name] for name in parts.shapes[part]}) if kept else shared[part]
        for part in plan.keep
    }
    if request.phase == "receive":
        return Reply(request.client, len(index), seconds=time.perf_counter() - started)
    if link and request.phase == "train":
        worker.swap_parameters(plan.train)
    worker.load({**{part: shared[part] for part in request.versions}, **mine})
    if request.phase == "evaluate":
        on: Mapping[str, Index | None] = tests or {request.client: None}
        folders = {name: store.folder / f"test-features-{name}" if plan.freeze_encoder else None for name in on}
        scores = {name: worker.score(examples, only, folders[name], plan, link) for name, only in on.items()}
        return Reply(request.client, len(index), scores=scores, seconds=time.perf_counter() - started)
    states = worker.kept(examples, index, store.folder / "features") if plan.freeze_encoder else None
    if request.phase == "hidden_states":
        assert states is not None
        return Reply(
            request.client,
            len(index),
            weights={"hidden_states": message(states, index, dtype)},
            flops=encoder_flops(parts, states.stored) + encoder_flops(parts, states.missing(index)),
            seconds=time.perf_counter() - started,
        )
    memory = store.optimizer.load(request.round) if worker.train.optimizer_state == "persist" else {}
    reply, memory = yield from worker.training(
        plan,
        request.round,
        request.client,
        examples,
        index,
        told,
        request.first,
        states,
        request.span,
        memory,
        link,
    )
    if memory:
        store.optimizer.save(request.round, memory)
    if plan.keep:
        store.save(request.round, part_tensors(worker.model, parts, plan.keep))
    rest, sent = store.rest.load(request.round), {}
    for part in plan.send:
        leaving, left = carry(part_tensors(worker.model, parts, [part]), dtype, rest)
        sent[part] = {name: tensor.to("cpu", copy=True) for name, tensor in leaving.items()}
        rest.update(left)
    if rest:
        store.rest.save(request.round, rest)
    return replace(reply, weights=sent)


def finish(work: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and return what it returns."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _places(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Every parameter's name -> the modules it stands in, and under which name; a tied one stands in several."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                made[names[id(parameter)]].append((module, leaf))
    return made
