"""How many distinct rows go into what a site sends: counted before anything is computed.

A row is a line of the site's data: a long text in ten chunks is one row, a block of packed texts counts as the row
of its first token. What is counted, by payload:

* ``weights`` and ``activations``: the rows of the batches of all of the round's steps; of masked language modeling
  those with a masked token, for nothing is learned from others. In activations every row's states stand apart, so
  that the count says how much the site tells at once and hides nobody.
* ``weights`` at level ``example``, where a coin decides of each example whether it takes part in a step: as many
  rows as take part in all rounds but one of a million.
* ``scores``: the test rows; where sources are scored apart, of each of them.
* ``hidden_states``: all training rows, once; every row's states stand apart here too.

A step that barely learns does not count: with a learning rate below a hundredth of the round's highest, as where
a schedule falls to nothing after the first batch. Nor does one of which later steps may leave as little. This
bounds what a computation over crafted settings tells.
Crafted weights, a crafted tokenizer, which may leave nothing of most rows, and the difference of two rounds get
around it; against these only noise and masked sums help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from fedstrata.client.optimizer import learning_rate
from fedstrata.client.poisson import sampling
from fedstrata.client.steps import steps
from fedstrata.job.train_table import Train
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import BATCH, ORDER, Streams
from fedstrata.sites.site import Site
from fedstrata.tasks import Examples, Task
from fedstrata.tasks.mlm import MaskedLM

BARELY = 0.01
"""Share of the round's highest learning rate below which a step does not count."""
MOST_STEPS = 100_000
"""Steps looked at; later ones do not count."""
SELDOM = 1e-6
"""Probability that fewer rows take part than are counted, where coins decide."""


def rows_behind(site: Site, request: Request) -> int:
    """Distinct rows that go into the reply to a request; 0 where nothing of them does."""
    data, trainer = site.data, site.runtime.trainer
    if request.phase == "train":
        private = site.runtime.private
        if private and private.table.level == "example":
            return rows_sampled(trainer.train, distinct_rows(data.train, data.index), len(data.index), request)
        return rows_trained_on(trainer.train, trainer.streams, data.train, data.index, request, trainer.task)
    if request.phase == "evaluate":
        return distinct_rows(data.test, data.tests.get(site.name, data.index[:0]))
    return distinct_rows(data.train, data.index) if request.phase == "hidden_states" else 0


def distinct_rows(examples: Examples, index: Index) -> int:
    """Rows that the examples at ``index`` come from."""
    return len(np.unique(examples.tokens.rows[index]))


def scored_apart(examples: Examples, index: Index, least: int) -> Examples:
    """A site's test examples; its sources are scored apart only where each has ``least`` rows at least.

    With a score of all rows and those of the other sources, that of one that is left out would be known too.

    Args:
        examples: all test examples.
        index: the site's own.
        least: fewest distinct rows behind a score.
    """
    rows = [distinct_rows(examples, np.intersect1d(index, own)) for own in examples.pools.values()]
    return replace(examples, pools={}) if any(0 < count < least for count in rows) else examples


def rows_sampled(train: Train, rows: int, examples: int, request: Request) -> int:
    """Distinct rows that take part in the steps of a round that learn, but for :data:`SELDOM`.

    A row of several examples takes part more often than counted here. At least 1: without any a message is noise
    alone, of which nobody has to be protected.

    Args:
        train: how the client trains.
        rows: distinct rows of its examples.
        examples: their number.
        request: names the span of the learning-rate schedule.
    """
    from scipy.special import bdtrik  # comes with the accountant that noise needs

    rate, total, epoch = sampling(examples, train)
    learns = _learning(train, ScheduleSpan(total, epoch, *request.span))
    learning = sum(learns(number, number // epoch) for number in range(min(total, MOST_STEPS)))
    never = (1 - rate) ** learning
    if never == 0 or never == 1:
        return rows if never == 0 else 0
    return max(1, math.ceil(float(bdtrik(SELDOM, rows, 1 - never))))


def rows_trained_on(
    train: Train, streams: Streams, examples: Examples, index: Index, request: Request, task: Task | None = None
) -> int:
    """Distinct rows in the steps of a round that learn.

    Args:
        train: how the client trains.
        streams: all randomness.
        examples: all examples.
        index: the client's own.
        request: names the round, the client and the span of the learning-rate schedule.
        task: makes the batches; None where what it masks is not looked at.
    """
    every = distinct_rows(examples, index)
    masks = streams.numpy(request.round, request.client, BATCH) if isinstance(task, MaskedLM) else None
    lasts = _left(train) ** (train.epochs * len(index)) >= BARELY  # no step has fewer than one example
    if masks is None and train.steps is None and _is_constant(train) and lasts:
        return every  # the first epoch has them all, at the highest rate
    seen: set[int] = set()
    order = streams.numpy(request.round, request.client, ORDER)
    learning: Callable[[int, int], bool] | None = None
    for number, step in enumerate(steps(examples.tokens.lengths[index], train, order)):
        learning = learning or _learning(train, ScheduleSpan(step.total, step.epoch_steps, *request.span))
        learns = learning(number, step.epoch)
        for chosen in (index[positions] for positions in step.batches):
            if masks is not None:
                assert isinstance(task, MaskedLM)
                masked = task.batch(examples, chosen, masks, train.width).positions
                assert isinstance(masked, torch.Tensor)
                chosen = chosen[masked.any(1).numpy()]
            if learns:
                seen.update(examples.tokens.rows[chosen].tolist())
        if len(seen) == every or number >= MOST_STEPS:
            break
    return len(seen)


def _learning(train: Train, span: ScheduleSpan) -> Callable[[int, int], bool]:
    """Whether a step of a round counts, by its number and epoch: for what is left of it in the end."""
    left = _left(train)

    def lasting(number: int, epoch: int) -> float:
        return learning_rate(train, span, number, epoch) * left ** (span.steps - 1 - number)

    highest = max(lasting(number, number // span.epoch) for number in _places(train, span))
    return lambda number, epoch: lasting(number, epoch) >= BARELY * highest > 0


def _left(train: Train) -> float:
    """Share of what a step has taught that the next one leaves, at least.

    AdamW gives each step the same length, whatever the gradients: FedProx's pull may then take all back in one,
    however small the learning rate, and only what the momentum carries on is left for certain.
    """
    if train.proximal_mu and train.optimizer == "adamw":
        return train.betas[0]
    return max(0.0, 1 - train.learning_rate * (train.weight_decay + train.proximal_mu))


def _is_constant(train: Train) -> bool:
    return train.lr_schedule == "constant" and not train.warmup_ratio


def _places(train: Train, span: ScheduleSpan) -> Iterable[int]:
    """Steps among which is one that counts as much as any that is looked at: of a constant rate the last.

    A rate that rises to one in between does so over many steps, which count as well.
    """
    if _is_constant(train) and train.lr_decay == 1:
        return [span.steps - 1]
    last = max(MOST_STEPS, span.steps - MOST_STEPS)
    return chain(range(min(MOST_STEPS, span.steps)), range(last, span.steps))
