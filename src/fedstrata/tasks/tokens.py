"""What the tasks that predict tokens share: the head at chosen positions, its loss and its scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fedstrata.models.masked_head import head_at
from fedstrata.tasks import Batch


@dataclass(frozen=True, kw_only=True)
class TokenTask:
    """A task whose batches say at which positions a token is predicted.

    Attributes:
        full_head: compute the head at every position, as the papers do, and not at the predicted ones alone.
    """

    full_head: bool = False

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Scores over the vocabulary at the predicted positions, ``[n, V]``."""
        assert batch.positions is not None
        if self.full_head:
            return model(**batch.inputs).logits[batch.positions]  # type: ignore[no-any-return]
        with head_at(model, batch.positions):
            return model(**batch.inputs).logits[0]  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the predicted positions, in nats."""
        total = functional.cross_entropy(self.logits(model, batch).float(), batch.targets, reduction="sum")
        return total / max(len(batch.targets), 1)  # a batch of unknown tokens alone has nothing to predict

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """``loss`` (nats per predicted token), ``perplexity`` (its exponential), ``accuracy`` of those tokens."""
        loss = right = count = 0.0
        for batch in batches:
            logits = self.logits(model, batch).float()
            loss += float(functional.cross_entropy(logits, batch.targets, reduction="sum"))
            right += float((logits.argmax(-1) == batch.targets).sum())
            count += len(batch.targets)
        loss /= max(count, 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": right / max(count, 1)}
