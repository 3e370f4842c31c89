"""The confusion matrix of classes, and their scores.

scikit-learn has these, too, but takes 0.6 to 1.0 s to load in every run. A test holds them to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.int64]
"""Examples by true class (rows) and predicted class."""
Floats = npt.NDArray[np.float64]


class Counts(NamedTuple):
    """What scores are made of, ``[classes]``: a server may name 100,000, whose matrix would take 80 GB."""

    right: Matrix
    examples: Matrix
    guesses: Matrix


class ClassScores(NamedTuple):
    """Scores of each class, ``[classes]``; 0 where one is not defined."""

    precision: Floats
    recall: Floats
    f1: Floats
    examples: Matrix


def confusion(truth: Any, guess: Any, classes: int) -> Matrix:
    """The confusion matrix of class numbers ``[n]`` from 0 to ``classes`` - 1."""
    cells = np.asarray(truth, np.int64) * classes + np.asarray(guess, np.int64)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def counts(truth: Any, guess: Any, classes: int) -> Counts:
    """How many examples each class has, and is predicted for, and both; arguments as of :func:`confusion`."""
    truth, guess = np.asarray(truth, np.int64), np.asarray(guess, np.int64)
    return Counts(*(np.bincount(found, minlength=classes) for found in (truth[truth == guess], truth, guess)))


def class_scores(found: Counts) -> ClassScores:
    """Precision, recall, F1 and number of true examples of each class."""
    right, examples, guesses = found
    return ClassScores(
        _share(right, guesses), _share(right, examples), _share(2 * right, examples + guesses), examples
    )


def matthews_coefficient(found: Counts) -> float:
    """Matthews correlation of all classes; 0 where all examples or all predictions are of one class.

    Source: Gorodkin, Comparing two K-category assignments by a K-category correlation coefficient, 2004.
    """
    right, n = found.right.sum(), found.examples.sum().astype(np.float64)
    examples, guesses = (x.astype(np.float64) for x in (found.examples, found.guesses))
    covariance = right * n - examples @ guesses
    variances = (n * n - guesses @ guesses) * (n * n - examples @ examples)
    return float(covariance / np.sqrt(variances)) if variances else 0.0


def _share(part: Matrix, whole: Matrix) -> Floats:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
