"""Classification of single texts and of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.metrics import Predictions, scores
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.tasks.batches import Batch, Examples, branches, ids_of, per_example
from fedstrata.tasks.task import Predicted, TaskContext


@dataclass(frozen=True)
class Classify:
    """The tasks ``classify`` and ``pair``.

    Attributes:
        padding: id of the padding token.
        labels: class names in their order.
        positive: classes whose F1 scores are averaged into ``f1``; empty where it is not scored.
        kind: the task's word.
    """

    padding: int
    labels: tuple[str, ...]
    positive: tuple[str, ...] = ()
    kind: str = "classify"
    gathers = False

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        """Pad the examples; ``rng`` is not used."""
        return per_example(examples, index, self.padding, width)

    def token_ids(self, examples: Examples, index: Index) -> Index:
        """The examples' own, and that of padding."""
        return ids_of(examples, index, self.padding)

    def head_positions(self, lengths: Index, width: int) -> int:
        """One per example."""
        return len(lengths)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the examples, in nats; of a head with branches the sum over them."""
        losses = [functional.cross_entropy(logits, batch.targets) for logits in branches(model, batch)]
        return torch.stack(losses).sum()

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """The metrics of classification over all batches, and the mean ``loss``."""
        return self.metrics(self.predict(model, batch) for batch in batches)

    def predict(self, model: nn.Module, batch: Batch) -> Predicted:
        """Classes, and the summed cross-entropy in nats."""
        logits = model(**batch.inputs).logits.float()
        loss = float(functional.cross_entropy(logits, batch.targets, reduction="sum"))
        return Predicted(batch.targets.cpu().numpy(), logits.argmax(-1).cpu().numpy(), loss)

    def metrics(self, predicted: Iterable[Predicted]) -> dict[str, float]:
        """See :meth:`score`."""
        every = list(predicted)
        truth, guess = (np.concatenate(found) for found in ([p.truth for p in every], [p.guess for p in every]))
        loss = sum(batch.loss for batch in every) / len(truth)
        predictions = Predictions(truth, guess, loss, self.labels, self.positive)
        return {**scores(TASK_KINDS[self.kind].metrics, predictions), "loss": loss}


def positive_classes(labels: Sequence[str], chosen: Sequence[str] | None, wanted: bool) -> tuple[str, ...]:
    """The classes behind ``f1``: the chosen ones, else the second of two.

    Args:
        labels: all class names.
        chosen: the job's ``task.positive``.
        wanted: whether ``f1`` is the job's headline.

    Raises:
        UserError: a chosen class is not a class, or ``f1`` is wanted, there are more than two classes and none is
            chosen.
    """
    known = set(labels)
    for name in chosen or ():
        if name not in known:
            raise UserError(f"[task] positive: {name!r} is not a class; {did_you_mean(name, labels)}")
    if chosen is None and wanted and len(labels) != 2:
        raise UserError(
            f"[task] positive: metric 'f1' needs the classes to average over; expected one of: {', '.join(labels)}"
        )
    return tuple(chosen or (labels[1:] if len(labels) == 2 else ()))


def build(context: TaskContext) -> Classify:
    """The task of a job: see :func:`positive_classes`."""
    task, labels = context.job.task, context.labels or ()
    positive = positive_classes(labels, task.positive, task.headline == "f1") if labels else ()
    return Classify(context.padding, labels, positive, task.kind)
