"""Metrics: what all predictions on a test set come to. Libraries that are slow to load are imported when called.

A new metric is one function and its entry in one of the tables at the end of this file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Predictions:
    """Every prediction on a test set, with what was right.

    Attributes:
        truth: what was right: classes, token ids or numbers ``[n]``; for tags the names of each sentence's.
        guess: what was predicted, in the same form.
        loss: mean loss per prediction.
        labels: class names in their order, where ``truth`` holds classes.
        positive: those of them whose F1 scores are averaged into ``f1``.
    """

    truth: Any
    guess: Any
    loss: float = math.nan
    labels: Sequence[str] = ()
    positive: Sequence[str] = ()

    @cached_property
    def class_counts(self) -> Any:
        """What the scores of classes are made of."""
        from fedstrata.job.confusion import counts

        return counts(self.truth, self.guess, len(self.labels))

    @cached_property
    def class_f1(self) -> Any:
        """F1 of each class, ``[classes]``; 0 for a class that nobody predicts or has."""
        from fedstrata.job.confusion import class_scores

        return class_scores(self.class_counts).f1


Metric = Callable[[Predictions], float | None]
"""None where the metric is not defined."""


def scores(metrics: Mapping[str, Metric], predictions: Predictions) -> dict[str, float]:
    """Every metric that is defined for the predictions."""
    found = {name: metric(predictions) for name, metric in metrics.items()}
    return {name: value for name, value in found.items() if value is not None}


def loss(predictions: Predictions) -> float:
    """The mean loss: for tokens in nats."""
    return predictions.loss


def perplexity(predictions: Predictions) -> float:
    """The exponential of the loss."""
    return math.exp(min(predictions.loss, 700))


def accuracy(predictions: Predictions) -> float:
    """Share of the predictions that are right; 0 where there is none."""
    import numpy as np

    return float(np.mean(predictions.truth == predictions.guess)) if len(predictions.truth) else 0.0


def macro_f1(predictions: Predictions) -> float:
    """Mean F1 over all classes."""
    import numpy as np

    return float(np.mean(predictions.class_f1))


def positive_f1(predictions: Predictions) -> float | None:
    """Mean F1 over the positive classes."""
    if not predictions.positive:
        return None
    import numpy as np

    places = {name: place for place, name in enumerate(predictions.labels)}
    return float(np.mean([predictions.class_f1[places[name]] for name in predictions.positive]))


def matthews(predictions: Predictions) -> float:
    """Matthews correlation coefficient; 0 where there is one class alone."""
    from fedstrata.job.confusion import matthews_coefficient

    return matthews_coefficient(predictions.class_counts)


def pearson(predictions: Predictions) -> float:
    """Pearson correlation; 0 where one side does not vary by more than rounding."""
    from scipy import stats

    truth, guess = predictions.truth, predictions.guess
    return float(stats.pearsonr(truth, guess).statistic) if _vary(predictions) else 0.0


def spearman(predictions: Predictions) -> float:
    """Spearman rank correlation; 0 where one side does not vary by more than rounding."""
    from scipy import stats

    truth, guess = predictions.truth, predictions.guess
    return float(stats.spearmanr(truth, guess).statistic) if _vary(predictions) else 0.0


def _vary(predictions: Predictions) -> bool:
    """Whether both sides do: of predictions of one number the last bits differ, as sums are rounded in fp32."""
    import numpy as np

    truth, guess = predictions.truth, predictions.guess
    if len(truth) < 2:
        return False
    rounding = 16 * np.finfo(np.float32).eps * np.abs(guess).max()
    return bool(np.ptp(truth) > 0 and np.ptp(guess) > rounding)


def mean_squared_error(predictions: Predictions) -> float:
    """Mean of the squared differences."""
    import numpy as np

    return float(np.mean((predictions.truth - predictions.guess) ** 2))


def _seqeval() -> ModuleType:
    """seqeval's metrics. That tags name no entities is said once, where rows are read, and not of every tag."""
    import seqeval.metrics

    warnings.filterwarnings("ignore", ".* seems not to be NE tag")
    return seqeval.metrics  # type: ignore[no-any-return]


def entity_f1(predictions: Predictions) -> float:
    """F1 over all entities together (micro), as conlleval counts: an entity is right as a whole or not."""
    return float(_seqeval().f1_score(predictions.truth, predictions.guess, zero_division=0))


def entity_precision(predictions: Predictions) -> float:
    """Share of the predicted entities that are right as a whole; 0 where none is predicted."""
    return float(_seqeval().precision_score(predictions.truth, predictions.guess, zero_division=0))


def entity_recall(predictions: Predictions) -> float:
    """Share of the true entities that are found as a whole; 0 where there is none."""
    return float(_seqeval().recall_score(predictions.truth, predictions.guess, zero_division=0))


def word_accuracy(predictions: Predictions) -> float:
    """Share of the words whose tag is right; 0 where there is none: a tokenizer may drop every word of a text."""
    if not any(predictions.truth):
        return 0.0
    return float(_seqeval().accuracy_score(predictions.truth, predictions.guess))


LANGUAGE_MODELING: dict[str, Metric] = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}
CLASSIFICATION: dict[str, Metric] = {
    "accuracy": accuracy,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "f1": positive_f1,
}
REGRESSION: dict[str, Metric] = {"pearson": pearson, "spearman": spearman, "loss": mean_squared_error}
TAGGING: dict[str, Metric] = {
    "f1": entity_f1,
    "precision": entity_precision,
    "recall": entity_recall,
    "accuracy": word_accuracy,
}

RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("accuracy", "macro_f1", "f1", "precision", "recall"), (0.0, 1.0)),
    **dict.fromkeys(("matthews", "pearson", "spearman"), (-1.0, 1.0)),
    "loss": (0.0, 1e12),
    "perplexity": (1.0, math.exp(700)),
}
"""Metric -> the least and the largest value that it can have; of a loss what nobody trains with."""
