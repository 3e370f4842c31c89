"""Regression: a number for a text or a pair of texts, such as how alike two sentences are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedstrata.job.metrics import Predictions, scores
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.tasks.batches import Batch, Examples, branches, ids_of, per_example
from fedstrata.tasks.task import Predicted, TaskContext


@dataclass(frozen=True)
class Regress:
    """The task ``regress``.

    Attributes:
        padding: id of the padding token.
        kind: the task's name in a job file.
    """

    padding: int
    kind: str = "regress"
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
        """Mean squared error over the examples; of a head with branches the sum over them."""
        targets = batch.targets.float()
        losses = [functional.mse_loss(logits.squeeze(-1), targets) for logits in branches(model, batch)]
        return torch.stack(losses).sum()

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """The metrics of regression over all batches."""
        return self.metrics(self.predict(model, batch) for batch in batches)

    def predict(self, model: nn.Module, batch: Batch) -> Predicted:
        """Numbers."""
        guess = model(**batch.inputs).logits.float().squeeze(-1).cpu().numpy()
        return Predicted(batch.targets.cpu().numpy(), guess)

    def metrics(self, predicted: Iterable[Predicted]) -> dict[str, float]:
        """See :meth:`score`."""
        every = list(predicted)
        truth, guess = (np.concatenate(found) for found in ([p.truth for p in every], [p.guess for p in every]))
        predictions = Predictions(truth, guess)
        return scores(TASK_KINDS[self.kind].metrics, predictions)


def build(context: TaskContext) -> Regress:
    """The task of a job."""
    return Regress(context.padding, context.job.task.kind)
