"""The optimizer replayed without data: what a client's tensors would be, had no text touched them.

Weight decay and the proximal term move every weight. The server knows the job and so can compute by how much; what
differs from that was moved by a gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fedstrata.audits.bench import Bench
from fedstrata.audits.play import Played, flat
from fedstrata.client.optimizer import add_proximal, anchor_of, learning_rate, make_optimizer, step
from fedstrata.client.steps import steps
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import ORDER
from fedstrata.wire.partial import held_back


def replayed(bench: Bench, played: Played, names: Iterable[str]) -> Tensors:
    """Sent tensors as they would have come back with gradients of 0, by name, fp32."""
    train, before = played.train, flat(played.before)
    parameters = {name: nn.Parameter(before[name].clone()) for name in names}
    anchor = anchor_of(parameters.values(), train)
    optimizer = make_optimizer(parameters, train, {})
    for rate in _rates(bench, played):
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        add_proximal(anchor, train)
        step(optimizer, rate)
    moved = {name: parameter.detach() for name, parameter in parameters.items()}
    moved = held_back(moved, {name: before[name] for name in moved}, bench.parts.sharing)
    wire = bench.ready.runtime.wire
    return moved if wire.changes else wire.decode(wire.encode(moved)[0], held=moved)


def _rates(bench: Bench, played: Played) -> Iterator[float]:
    """The learning rate of each step.

    Under a budget of tokens an epoch has as many steps as the texts' lengths make. Of these the server knows no
    more than their sum; it would try the few ways to divide it, of which one leaves most rows where they were.
    """
    train, total = played.train, played.reply.steps
    epoch = math.ceil(played.reply.examples / (train.batch_size * train.gradient_accumulation))
    epochs: Iterable[int | None] = itertools.repeat(None, total)
    if train.tokens_per_batch is not None:
        order = bench.ready.runtime.trainer.streams.numpy(0, played.reply.client, ORDER)
        epochs = (each.epoch for each in steps(played.examples.tokens.lengths[played.index], train, order))
    span = ScheduleSpan(total, max(1, epoch), *bench.span)
    for number, of in enumerate(epochs):
        yield learning_rate(train, span, number, of)


def moved_beyond(bench: Bench, played: Played, names: Iterable[str]) -> Tensors:
    """By how much sent tensors differ from what the replay makes of them."""
    expected, after = replayed(bench, played, names), flat(played.after)
    return {name: after[name] - tensor for name, tensor in expected.items()}
