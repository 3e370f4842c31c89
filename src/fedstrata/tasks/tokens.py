"""What the tasks that predict tokens share: the head at chosen positions, its loss and its scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedstrata.job.metrics import Predictions, scores
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models.masked_head import head_at
from fedstrata.models.vocabulary_loss import vocabulary_loss
from fedstrata.tasks.batches import Batch, Examples
from fedstrata.tasks.task import Predicted


@dataclass(frozen=True, kw_only=True)
class TokenTask:
    """A task whose batches say at which positions a token is predicted.

    Attributes:
        kind: the task's name in a job file.
        full_head: compute the head at every position, as the papers do, and not at the predicted ones alone.
    """

    kind: str
    full_head: bool = False

    @property
    def gathers(self) -> bool:
        """The head is computed at the predicted positions alone."""
        return not self.full_head

    def has_targets(self, examples: Examples) -> bool:
        """Whether any token of examples can be predicted."""
        return bool(len(examples))

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Scores over the vocabulary at the predicted positions, ``[n, V]``."""
        assert batch.positions is not None
        if self.full_head:
            return model(**batch.inputs).logits[batch.positions]  # type: ignore[no-any-return]
        with head_at(model, batch.positions):
            return model(**batch.inputs).logits.flatten(0, 1)  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the predicted positions, in nats."""
        total = vocabulary_loss(self.logits(model, batch), batch.targets)
        return total / max(len(batch.targets), 1)  # a batch of unknown tokens alone has nothing to predict

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """The metrics of language modeling over the predicted tokens of all batches; the loss is in nats."""
        return self.metrics(self.predict(model, batch) for batch in batches)

    def predict(self, model: nn.Module, batch: Batch) -> Predicted:
        """Tokens, and the summed cross-entropy in nats."""
        logits = self.logits(model, batch)
        loss = float(vocabulary_loss(logits, batch.targets))
        return Predicted(batch.targets.cpu().numpy(), logits.argmax(-1).cpu().numpy(), loss)

    def metrics(self, predicted: Iterable[Predicted]) -> dict[str, float]:
        """See :meth:`score`."""
        every, none = list(predicted), np.empty(0, np.int64)
        truth = np.concatenate([none, *(batch.truth for batch in every)])
        guess = np.concatenate([none, *(batch.guess for batch in every)])
        predictions = Predictions(truth, guess, sum(batch.loss for batch in every) / max(len(truth), 1))
        return scores(TASK_KINDS[self.kind].metrics, predictions)
