"""A client's training in one round. The same code on every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.model_pass import Boundary, ModelPass
from fedstrata.client.optimizer import (
    Anchor,
    add_proximal,
    anchor_of,
    learning_rate,
    make_optimizer,
    memory_of,
    step,
)
from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.cost.flops import train_flops
from fedstrata.data.batching import batches
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import BATCH, DROPOUT, ORDER, Streams
from fedstrata.tasks import Batch, Examples, Task

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

        Returns:
            The reply, and the optimizer's memory where it persists.
        """
        started, plan = time.perf_counter(), request.plan
        trained = self.working.trainable(plan)
        anchor = self._anchor(plan, trained)
        optimizer = make_optimizer(trained, self.train, memory)
        self.working.changed(plan.train)
        dropout = self._dropout(request)
        losses: list[torch.Tensor] = []
        work, seen, newest = Positions(), 0, 0.0
        for span, chosen, batch in self._batches(request, examples, index):
            if not losses:
                model_pass.begin(span, trained)
            batch = model_pass.inputs(chosen, batch).to(self.working.device)
            model_pass.wait()
            self.working.model.train()
            with dropout.fork(), model_pass.local_model():
                losses.append(self._backward(batch))
            rate = learning_rate(self.train, span, len(losses) - 1)
            model_pass.step(partial(self._update, anchor, optimizer, rate))
            work += batch.work
            seen += len(chosen)
            callback(len(losses), span.steps, newest := newest_loss(losses, newest), seen)
            paused = time.perf_counter()
            yield
            started += time.perf_counter() - paused  # others' time
        model_pass.wait()
        parts = self.working.parts
        flops = train_flops(parts, plan, work) + model_pass.encoder_flops(parts)
        seconds = time.perf_counter() - started
        reply = _reply(request.client, len(index), losses, work, flops, seconds)
        return reply, memory_of(optimizer, trained) if self.train.optimizer_state == "persist" else {}

    def _dropout(self, request: Request) -> DropoutRng:
        seed = self.streams.integer(request.round, request.client, DROPOUT)
        return DropoutRng(seed, self.working.device)

    def _anchor(self, plan: Plan, trained: Parameters) -> Anchor:
        """The proximal term holds what is both trained and sent."""
        shared = {name for part in plan.send for name in self.working.parts.shapes[part]}
        return anchor_of((p for name, p in trained.items() if name in shared), self.train)

    def _batches(
        self, request: Request, examples: Examples, index: Index
    ) -> Iterator[tuple[ScheduleSpan, Index, Batch]]:
        """The batches of one round and their examples, each with the round's place in the schedule."""
        order = self.streams.numpy(request.round, request.client, ORDER)
        draw = self.streams.numpy(request.round, request.client, BATCH)
        epoch = -(-len(index) // self.train.batch_size)
        for total, positions in steps(examples.tokens.lengths[index], self.train, order):
            batch = self.task.batch(examples, index[positions], draw, self.train.width)
            yield ScheduleSpan(total, epoch, *request.span), index[positions], batch

    def _backward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch; its gradients then stand at the parameters, with a cut at those above it."""
        with autocast(self.working.device, self.train):
            loss = self.task.loss(self.working.model, batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def _update(
        self, anchor: Anchor, optimizer: torch.optim.Optimizer, rate: float, boundary: Boundary | None
    ) -> None:
        """Finish the step: backward through the client's lower layers from a boundary, then the optimizer."""
        if boundary and boundary[0].requires_grad:
            torch.autograd.backward(*boundary)
        add_proximal(anchor, self.train)
        step(optimizer, rate)


def newest_loss(losses: list[torch.Tensor], before: float) -> float:
    """The last step's loss; on a GPU that of the last step at which it is read, see :data:`LOSS_EVERY`."""
    if losses[-1].device.type != "cpu" and len(losses) % LOSS_EVERY != 1:
        return before
    return float(losses[-1])


def _reply(
    client: str, examples: int, losses: list[torch.Tensor], work: Positions, flops: int, seconds: float
) -> Reply:
    loss = float(np.mean(torch.stack(losses).tolist()))
    return Reply(client, examples, loss=loss, steps=len(losses), work=work, flops=flops, seconds=seconds)


def steps(lengths: Index, train: Train, order: np.random.Generator) -> Iterator[tuple[int, Index]]:
    """One round of a client: the number of its steps, with each of them, and the positions of each batch.

    Args:
        lengths: tokens of each of the client's examples, ``[n]``.
        train: how it trains.
        order: shuffles the batches, epoch by epoch.
    """
    total = train.epochs * -(-len(lengths) // train.batch_size)
    total = min(total, train.steps or total)
    done = 0
    for _ in range(train.epochs):
        for positions in batches(lengths, train.batch_size, order, train.group_by_length)[: total - done]:
            done += 1
            yield total, positions


def drain(generator: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and return what it returns."""
    try:
        while True:
            next(generator)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
