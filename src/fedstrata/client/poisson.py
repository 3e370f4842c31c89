"""Poisson sampling: every example takes part in every step by a coin of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstrata.client.steps import Step
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index


def sampling(count: int, train: Train) -> tuple[float, int, int]:
    """How a client with so many examples samples: probability of an example, steps of a round, and of an epoch.

    An epoch has as many steps as one that takes every example once; ``batch_size`` is the expected batch.
    """
    epoch = -(-count // train.batch_size)
    total = train.epochs * epoch
    return min(1.0, train.batch_size / max(1, count)), min(total, train.steps or total), epoch


def poisson_steps(lengths: Index, train: Train, draw: np.random.Generator) -> Iterator[Step]:
    """The steps of one round of a client; a step may have many batches, or none.

    Args:
        lengths: tokens of each of the client's examples, ``[n]``.
        train: how it trains; no batch has more than ``batch_size`` examples.
        draw: decides who takes part.
    """
    rate, total, epoch = sampling(len(lengths), train)
    for step in range(total):
        chosen = np.flatnonzero(draw.random(len(lengths)) < rate)
        chosen = chosen[np.argsort(lengths[chosen], kind="stable")]  # alike ones together: less padding
        batches = [chosen[i : i + train.batch_size] for i in range(0, len(chosen), train.batch_size)]
        yield Step(total, step // epoch, epoch, batches)
