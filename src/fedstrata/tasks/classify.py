"""Classification of single texts and of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from fedstrata.errors import UserError, did_you_mean
from fedstrata.tasks import Batch, Examples, branches, per_example


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
        """Mean cross-entropy over the examples, in nats; of a head with branches the sum over them."""
        losses = [functional.cross_entropy(logits, batch.targets) for logits in branches(model, batch)]
        return torch.stack(losses).sum()

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """``accuracy``, ``macro_f1`` over all classes, ``matthews``, ``loss``, and ``f1`` of the positive ones."""
        loss, truth, guess = 0.0, [], []
        for batch in batches:
            logits = model(**batch.inputs).logits.float()
            loss += float(functional.cross_entropy(logits, batch.targets, reduction="sum"))
            truth.append(batch.targets.cpu().numpy())
            guess.append(logits.argmax(-1).cpu().numpy())
        return {
            **scores(np.concatenate(truth), np.concatenate(guess), self.labels, self.positive),
            "loss": loss / sum(map(len, truth)),
        }


def scores(
    truth: npt.NDArray[np.int64],
    guess: npt.NDArray[np.int64],
    labels: Sequence[str],
    positive: Sequence[str] = (),
) -> dict[str, float]:
    """Scores of predicted class indices ``[n]``; a class nobody predicts or has counts as F1 = 0."""
    from sklearn import metrics  # here, as it is slow to load and a forecast has no need of it

    f1 = metrics.f1_score(truth, guess, labels=range(len(labels)), average=None, zero_division=0.0)
    made = {
        "accuracy": float(np.mean(truth == guess)),
        "macro_f1": float(np.mean(f1)),
        "matthews": float(metrics.matthews_corrcoef(truth, guess)) if len({*truth, *guess}) > 1 else 0.0,
    }
    if positive:
        made["f1"] = float(np.mean([f1[labels.index(name)] for name in positive]))
    return made


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
    for name in chosen or ():
        if name not in labels:
            raise UserError(f"[task] positive: {name!r} is not a class; {did_you_mean(name, labels)}")
    if chosen is None and wanted and len(labels) != 2:
        raise UserError(
            f"[task] positive: metric 'f1' needs the classes to average over; legal: {', '.join(labels)}"
        )
    return tuple(chosen or (labels[1:] if len(labels) == 2 else ()))
