"""A client's training in one round. The same code on every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.halves import Halves, step_halves, trained_in_bf16
from fedstrata.client.held_rows import HeldRows
from fedstrata.client.model_pass import Boundary, ModelPass, WholePass
from fedstrata.client.noisy_steps import NoisySteps
from fedstrata.client.optimizer import (
    Anchor,
    add_proximal,
    anchor_of,
    clip_gradients,
    learning_rate,
    make_optimizer,
    memory_of,
)
from fedstrata.client.private import ExampleNoise
from fedstrata.client.steps import Step, steps
from fedstrata.client.used_rows import Rates, only_rows, used_rows
from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import BATCH, DROPOUT, ORDER, Streams
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.wire.pure import check_remembered, remembered, undrawn

Result = TypeVar("Result")

StepCallback = Callable[[int, int, float, int], None]
"""Called after every step with: steps done, steps of the round, the newest loss known, examples seen."""


LOSS_EVERY = 16
"""Steps on a GPU between two at which the loss is read, which waits for all that is under way."""


def autocast(device: torch.device, train: Train) -> torch.autocast:
    """Inside, matrices are multiplied in bf16 where the job says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16")


@dataclass
class Trainer:
    """Trains the parts of a plan on a client's examples.

    Attributes:
        working: the model.
        task: makes batches and losses.
        train: the job's ``[train]``, every "auto" resolved.
        streams: all randomness.
    """

    working: WorkingModel
    task: Task
    train: Train
    streams: Streams

    def run(
        self,
        request: Request,
        examples: Examples,
        index: Index,
        model_pass: ModelPass,
        memory: Mapping[str, torch.Tensor],
        callback: StepCallback,
        noise: ExampleNoise | None = None,
    ) -> Generator[None, None, tuple[Reply, Tensors]]:
        """One client's training in one round, from the weights loaded before.

        A generator: it yields after every step, so that clients can interleave on one model.

        Args:
            request: names the round, the client, the plan and the span of the learning-rate schedule.
            examples: all examples.
            index: the client's own among them.
            model_pass: how batches go through the model.
            memory: of the optimizer, from the client's last round.
            callback: called after every step.
            noise: over the clipped gradients of the examples; None without any.

        Returns:
            The reply, and the optimizer's memory where it persists, also of what rests in this round.
        """
        started, plan = time.perf_counter(), request.plan
        trained = self.working.trainable(plan)
        self.working.changed(plan.train)
        dropout = self._dropout(request, noise)
        losses, predictions = list[torch.Tensor](), list[int]()
        work, seen, newest = Positions(), 0, 0.0
        whole, settings = noise is None and isinstance(model_pass, WholePass), remembered(self.task)
        with self._moving(request, examples, index, trained, whole) as (moving, rates, halves):
            anchor, held = self._anchor(plan, moving), HeldRows(self.working, plan, moving)
            optimizer = make_optimizer(moving, self.train, memory)
            noisy = self._noisy(noise, held)
            for drawn, batches in self._steps(request, examples, index, noisy):
                span = ScheduleSpan(drawn.total, drawn.epoch_steps, *request.span)
                if not losses:
                    model_pass.begin(span, moving)
                losses.append(self._step_gradients(batches, model_pass, dropout, noisy, moving))
                predictions.append(sum(batch.predictions for _, batch in batches))
                rates.append(learning_rate(self.train, span, len(losses) - 1, drawn.epoch))
                model_pass.step(partial(self._update, moving, anchor, held, optimizer, halves, rates[-1]))
                work = sum((batch.work for _, batch in batches), work)
                seen += sum(len(chosen) for chosen, _ in batches)
                callback(len(losses), span.steps, newest := newest_loss(losses, newest), seen)
                paused = time.perf_counter()
                yield
                started += time.perf_counter() - paused  # others' time
            model_pass.wait()
        check_remembered(self.task, settings, f"task: {type(self.task).__name__}", "no state of its own")
        flops = model_pass.flops(self.working.parts, work)
        kept = {**memory, **memory_of(optimizer, trained)} if self.train.optimizer_state == "persist" else {}
        return _reply(request.client, len(index), losses, predictions, work, flops, started), kept

    @contextmanager
    def _moving(
        self, request: Request, examples: Examples, index: Index, trained: Parameters, whole: bool
    ) -> Iterator[tuple[Parameters, Rates, Halves]]:
        """What the steps move in place of what is trained, their learning rates, and copies in bf16.

        ``whole``: the steps are plain ones, over the whole model or a head.
        """
        whole &= type(self.task).__module__.startswith("fedstrata.")  # a loss of one's own may read weights
        rows = self._used_rows(request, examples, index, trained) if whole else None
        with (
            only_rows(self.working, trained, rows, self.train.weight_decay) as (moving, rates),
            trained_in_bf16(self.working, moving if whole else {}, self.train) as halves,
        ):
            yield moving, rates, halves

    def _used_rows(
        self, request: Request, examples: Examples, index: Index, trained: Parameters
    ) -> tuple[str, Index] | None:
        """The rows of the word embeddings that this round uses, where training those alone comes to the same."""
        order = self.streams.numpy(request.round, request.client, ORDER)
        drawn = steps(examples.tokens.lengths[index], self.train, order)
        chosen = (index[positions] for step in drawn for positions in step.batches)
        return used_rows(self.working, trained, self.train, self.task, examples, chosen)

    def _noisy(self, noise: ExampleNoise | None, held: HeldRows) -> NoisySteps | None:
        return NoisySteps(self.working, self.task, self.train, self._autocast, noise, held.rows) if noise else None

    def _autocast(self) -> torch.autocast:
        return autocast(self.working.device, self.train)

    def _dropout(self, request: Request, noise: ExampleNoise | None) -> DropoutRng:
        seed = self.streams.integer(request.round, request.client, DROPOUT) if noise is None else noise.dropout
        return DropoutRng(seed, self.working.device)

    def _anchor(self, plan: Plan, trained: Parameters) -> Anchor:
        """The proximal term holds what is both trained and sent."""
        shared = {name for part in plan.send for name in self.working.parts.shapes[part]}
        return anchor_of((p for name, p in trained.items() if name in shared), self.train)

    def _steps(
        self, request: Request, examples: Examples, index: Index, noisy: NoisySteps | None = None
    ) -> Iterator[tuple[Step, list[tuple[Index, Batch]]]]:
        """The steps of one round, each with its batches and their examples."""
        if noisy is not None:
            yield from noisy.steps(examples, index)
            return
        order = self.streams.numpy(request.round, request.client, ORDER)
        draw = self.streams.numpy(request.round, request.client, BATCH)
        for drawn in steps(examples.tokens.lengths[index], self.train, order):
            chosen = [index[positions] for positions in drawn.batches]
            with undrawn(self.task, f"task: {type(self.task).__name__}.batch", "its argument draw"):
                batches = [(each, self.task.batch(examples, each, draw, self.train.width)) for each in chosen]
            yield drawn, batches

    def _step_gradients(
        self,
        batches: Sequence[tuple[Index, Batch]],
        model_pass: ModelPass,
        dropout: DropoutRng,
        noisy: NoisySteps | None,
        trained: Parameters,
    ) -> torch.Tensor:
        if noisy is not None:
            return noisy.gradients(batches, model_pass, dropout, trained)
        return self._gradients(batches, model_pass, dropout)

    def _gradients(
        self, batches: Sequence[tuple[Index, Batch]], model_pass: ModelPass, dropout: DropoutRng
    ) -> torch.Tensor:
        """The mean loss over all predictions of a step's batches; its gradients then stand at the parameters."""
        total, losses = sum(batch.predictions for _, batch in batches), []
        for chosen, batch in batches:
            share = batch.predictions / total if total else 1 / len(batches)
            batch = model_pass.inputs(chosen, batch).to(self.working.device)
            model_pass.wait()
            self.working.model.train()
            with dropout.fork(), model_pass.local_model():
                losses.append(self._backward(batch, share))
        return torch.stack(losses).double().sum()

    def _backward(self, batch: Batch, share: float) -> torch.Tensor:
        """A batch's share of a step's loss; its gradients are added at the parameters (those above a cut)."""
        with autocast(self.working.device, self.train):
            loss = share * self.task.loss(self.working.model, batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def _update(
        self,
        trained: Parameters,
        anchor: Anchor,
        held: HeldRows,
        optimizer: torch.optim.Optimizer,
        halves: Halves,
        rate: float,
        boundary: Boundary | None,
    ) -> None:
        """Finish the step: backward through the client's lower layers from a boundary, then the optimizer."""
        if boundary and boundary[0].requires_grad:
            torch.autograd.backward(*boundary)
        held.clear_gradients()
        add_proximal(anchor, self.train)
        clip_gradients(trained, self.train)
        step_halves(optimizer, rate, halves)
        held.put_back()


def newest_loss(losses: list[torch.Tensor], before: float) -> float:
    """The last step's loss; on a GPU that of the last step at which it is read, see :data:`LOSS_EVERY`."""
    if losses[-1].device.type != "cpu" and len(losses) % LOSS_EVERY != 1:
        return before
    return float(losses[-1])


def _reply(
    client: str,
    examples: int,
    losses: list[torch.Tensor],
    predictions: list[int],
    work: Positions,
    flops: int,
    started: float,
) -> Reply:
    """The mean loss is that of the steps that predicted something; a step without has the loss 0."""
    told = [loss for loss, count in zip(torch.stack(losses).tolist(), predictions, strict=True) if count]
    loss = float(np.mean(told or [0.0]))
    seconds = time.perf_counter() - started  # now that a GPU has computed all
    return Reply(client, examples, loss=loss, steps=len(losses), work=work, flops=flops, seconds=seconds)


def drain(generator: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and return what it returns."""
    try:
        while True:
            next(generator)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
