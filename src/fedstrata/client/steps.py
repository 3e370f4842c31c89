"""The optimizer steps of a client's round: which examples each of them sees, and in which batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedstrata.data.batching import batches, token_batches
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        total: steps of the round.
        epoch: the 0-based local epoch that it belongs to.
        epoch_steps: steps of the first epoch, and of every one unless ``tokens_per_batch`` is set.
        batches: of ``gradient_accumulation`` batches, fewer at an epoch's end, the positions of the examples.
    """

    total: int
    epoch: int
    epoch_steps: int
    batches: list[Index]


def steps(lengths: Index, train: Train, order: np.random.Generator) -> Iterator[Step]:
    """The steps of one round of a client.

    Args:
        lengths: tokens of each of the client's examples, ``[n]``.
        train: how it trains.
        order: shuffles the batches, epoch by epoch.
    """
    total, epoch_steps = _count(lengths, train, order)
    done = 0
    for epoch in range(train.epochs):
        for group in _groups(epoch_batches(lengths, train, order), train)[: total - done]:
            done += 1
            yield Step(total, epoch, epoch_steps, group)


def examples_passed(examples: int, train: Train) -> int:
    """How many of a client's ``examples`` go through the model in a round, each as often as it does.

    Under a budget of tokens per batch ``steps`` is not counted in examples, and left out.
    """
    passed = train.epochs * examples
    if train.steps is None or train.tokens_per_batch is not None:
        return passed
    return min(passed, train.steps * train.batch_size * train.gradient_accumulation)


def epoch_batches(lengths: Index, train: Train, order: np.random.Generator) -> list[Index]:
    """The batches of one pass over all examples; arguments as :func:`steps`."""
    if train.tokens_per_batch is None:
        return batches(lengths, train.batch_size, order, train.group_by_length)
    widths = lengths if train.width is None else np.full_like(lengths, train.width)
    return token_batches(widths, train.tokens_per_batch, order, train.group_by_length)


def _groups(made: list[Index], train: Train) -> list[list[Index]]:
    """Batches by the step that they are for."""
    size = train.gradient_accumulation
    return [made[i : i + size] for i in range(0, len(made), size)]


def _count(lengths: Index, train: Train, order: np.random.Generator) -> tuple[int, int]:
    """Steps of the round, and of its first epoch.

    Under a budget of tokens the number of batches depends on the shuffle, so the epochs are drawn with a copy of
    the generator.
    """
    size = train.gradient_accumulation
    if train.tokens_per_batch is None:
        epoch = -(-len(lengths) // (train.batch_size * size))
        total = train.epochs * epoch
        return min(total, train.steps or total), epoch
    order = copy.deepcopy(order)
    total, first = 0, 0
    for _ in range(train.epochs if len(lengths) else 0):
        total += -(-len(epoch_batches(lengths, train, order)) // size)
        first = first or total
        if train.steps and total >= train.steps:
            return train.steps, first
    return total, first
