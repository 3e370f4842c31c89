"""The interface of a task, and what it is built from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import nn

from fedstrata.job.tables import Job
from fedstrata.plan.kinds import Index
from fedstrata.tasks.batches import Batch, Examples


@dataclass(frozen=True)
class Predicted:
    """What a model predicts of one batch.

    Attributes:
        truth: what was to be predicted, as the task's metrics take it.
        guess: what is predicted.
        loss: sum over the predictions.
        origin: as of :class:`fedstrata.tasks.batches.Batch`.
    """

    truth: Any
    guess: Any
    loss: float = 0.0
    origin: Index | None = None


class Task(Protocol):
    """What the engine has to know to train and score a model: batches, a loss and scores.

    Any object with these attributes serves; it needs no base class. What the job, the data and the model have to
    know before a task is built (labels, text columns, model class, metrics) is the task's
    :class:`fedstrata.job.task_kinds.TaskKind`.
    """

    @property
    def kind(self) -> str:
        """The task's name in a job file: a key of :data:`fedstrata.job.task_kinds.TASK_KINDS`."""

    @property
    def gathers(self) -> bool:
        """Whether the head is computed at the predicted positions alone (:mod:`fedstrata.models.masked_head`)."""

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        """The examples at ``index`` as a batch of ``width`` tokens (the longest example's when None)."""

    def head_positions(self, lengths: Index, width: int) -> int:
        """How many positions of a batch go through the head, as ``batch(...).work.predicted`` will count them.

        Where that is a matter of chance, the expected number.

        Args:
            lengths: tokens of each example of the batch, ``[B]``.
            width: what the batch is padded to.
        """

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss over the batch's predictions, a scalar with a graph."""

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Every metric of the task over all batches; sums are over predictions, not batches."""


@runtime_checkable
class FixedTokens(Protocol):
    """A task whose batches hold the tokens of their examples and padding; none that are drawn."""

    def token_ids(self, examples: Examples, index: Index) -> Index:
        """The ids that batches of these examples can hold, each once, in rising order."""


@runtime_checkable
class SpreadTask(Protocol):
    """A task whose batches may be predicted by several workers; others are scored in one process.

    ``score(model, batches)`` is then ``metrics`` of what ``predict`` gives for each of the batches; see
    :func:`is_spread`.
    """

    def predict(self, model: nn.Module, batch: Batch) -> Predicted:
        """The model on one batch."""

    def metrics(self, predicted: Iterable[Predicted]) -> dict[str, float]:
        """Every metric of the task over all batches, in their order."""


def is_spread(task: Task) -> TypeGuard[SpreadTask]:
    """Whether a task's score is ``metrics`` of what it predicts.

    Not where a class of one's own has a ``score`` and leaves the rest to the task that it wraps or extends.
    """
    if not isinstance(task, SpreadTask):
        return False
    order = [vars(base) for base in type(task).__mro__]
    score, *rest = (
        next((place for place, own in enumerate(order) if name in own), len(order))
        for name in ("score", "predict", "metrics")
    )
    return score >= min(rest)


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from.

    Attributes:
        job: the stage's job.
        labels: class names in their order; None for a task without classes.
        tokenizer: the model's; None in a forecast, whose task makes no batches.
        vocabulary: rows of the model's table of token embeddings.
    """

    job: Job
    labels: tuple[str, ...] | None = None
    tokenizer: Any = None
    vocabulary: int = 0

    @property
    def padding(self) -> int:
        """Id of the padding token; 0 without a tokenizer."""
        return 0 if self.tokenizer is None else int(self.tokenizer.pad_token_id)
