"""Regression: a number for a text or a pair of texts, such as how alike two sentences are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from fedstrata.tasks import Batch, Examples, branches, per_example


@dataclass(frozen=True)
class Regress:
    """The task ``regress``.

    Attributes:
        padding: id of the padding token.
    """

    padding: int
    kind = "regress"

    def batch(
        self,
        examples: Examples,
        index: npt.NDArray[np.int64],
        rng: np.random.Generator,
        width: int | None = None,
    ) -> Batch:
        """Pad the examples; ``rng`` is not used."""
        return per_example(examples, index, self.padding, width)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean squared error over the examples; of a head with branches the sum over them."""
        targets = batch.targets.float()
        losses = [functional.mse_loss(logits.squeeze(-1), targets) for logits in branches(model, batch)]
        return torch.stack(losses).sum()

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """``pearson``, ``spearman`` and ``loss``, the mean squared error."""
        truth, guess = [], []
        for batch in batches:
            truth.append(batch.targets.cpu().numpy())
            guess.append(model(**batch.inputs).logits.float().squeeze(-1).cpu().numpy())
        return scores(np.concatenate(truth), np.concatenate(guess))


def scores(truth: npt.NDArray[np.floating], guess: npt.NDArray[np.floating]) -> dict[str, float]:
    """Scores of predicted numbers ``[n]``; a correlation is 0 where one side does not vary."""
    from scipy import stats  # here, as it is slow to load and a forecast has no need of it

    vary = len(truth) > 1 and np.ptp(truth) > 0 and np.ptp(guess) > 0
    return {
        "pearson": float(stats.pearsonr(truth, guess).statistic) if vary else 0.0,
        "spearman": float(stats.spearmanr(truth, guess).statistic) if vary else 0.0,
        "loss": float(np.mean((truth - guess) ** 2)),
    }
