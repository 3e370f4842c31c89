"""Tagging: a class for every word, such as named entities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from fedstrata.data.batching import pad
from fedstrata.plan.messages import Positions
from fedstrata.tasks import Batch, Examples, padded

UNLABELED = -100
"""The class of a token that is not the first piece of a word; cross-entropy leaves it out."""


@dataclass(frozen=True)
class Tag:
    """The task ``tag``.

    Attributes:
        padding: id of the padding token.
        labels: tags in their order; entities are written ``B-…`` and ``I-…``, everything else ``O``.
    """

    padding: int
    labels: tuple[str, ...]
    kind = "tag"

    def batch(
        self,
        examples: Examples,
        index: npt.NDArray[np.int64],
        rng: np.random.Generator,
        width: int | None = None,
    ) -> Batch:
        """Pad the examples and their tags; ``rng`` is not used."""
        assert examples.labels is not None
        inputs = padded(examples.tokens, index, self.padding, width)
        offsets = examples.tokens.offsets
        tags = [examples.labels[offsets[i] : offsets[i + 1]] for i in index]
        rows, columns = inputs["input_ids"].shape
        return Batch(
            inputs=inputs,
            targets=pad(tags, UNLABELED, columns),
            work=Positions(rows * columns, rows * columns**2, rows * columns),
        )

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the words, in nats."""
        logits = model(**batch.inputs).logits.float()
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=UNLABELED)

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """``f1``, ``precision`` and ``recall`` of whole entities, ``accuracy`` of words, and ``loss``."""
        loss, truth, guess = 0.0, [], []
        for batch in batches:
            logits = model(**batch.inputs).logits.float()
            loss += float(
                functional.cross_entropy(
                    logits.flatten(0, 1), batch.targets.flatten(), ignore_index=UNLABELED, reduction="sum"
                )
            )
            for wanted, made in zip(batch.targets.cpu().numpy(), logits.argmax(-1).cpu().numpy(), strict=True):
                words = wanted != UNLABELED
                truth.append([self.labels[i] for i in wanted[words]])
                guess.append([self.labels[i] for i in made[words]])
        return {**scores(truth, guess), "loss": loss / max(1, sum(map(len, truth)))}


def scores(truth: list[list[str]], guess: list[list[str]]) -> dict[str, float]:
    """Scores of predicted tags, sentence by sentence, as conlleval counts: an entity is right as a whole or not.

    Precision, recall and F1 are over all entities together (micro); 0 where there is none.
    """
    from seqeval import metrics  # here, as it is slow to load and a forecast has no need of it

    return {
        "f1": float(metrics.f1_score(truth, guess, zero_division=0)),
        "precision": float(metrics.precision_score(truth, guess, zero_division=0)),
        "recall": float(metrics.recall_score(truth, guess, zero_division=0)),
        "accuracy": float(metrics.accuracy_score(truth, guess)),
    }
