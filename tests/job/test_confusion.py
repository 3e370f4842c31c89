"""Scores of classes, held to scikit-learn's."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from sklearn import metrics

from fedstrata.job.confusion import class_scores, confusion, counts, matthews_coefficient
from fedstrata.job.metrics import CLASSIFICATION, Predictions, scores

PAIRS = some.integers(1, 6).flatmap(
    lambda classes: some.tuples(
        some.just(classes), some.lists(some.tuples(*[some.integers(0, classes - 1)] * 2), min_size=1, max_size=60)
    )
)


@given(PAIRS)
def test_they_are_those_of_scikit_learn(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    classes, pairs = drawn
    truth, guess = map(np.asarray, zip(*pairs, strict=True))
    every = list(range(classes))
    matrix, found = confusion(truth, guess, classes), counts(truth, guess, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one class alone
        assert matrix.tolist() == metrics.confusion_matrix(truth, guess, labels=every).tolist()
        expected = metrics.precision_recall_fscore_support(truth, guess, labels=every, zero_division=0.0)
        correlation = metrics.matthews_corrcoef(truth, guess)
    for ours, theirs in zip(class_scores(found), expected, strict=True):
        assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-15)
    assert matthews_coefficient(found) == pytest.approx(correlation, abs=1e-12)


def test_scores_of_many_classes_take_no_matrix_of_them() -> None:
    """A server may name 100,000 classes to its sites; the scores of a few rows then took 80 GB."""
    labels = tuple(map(str, range(3000)))
    right, wrong = np.arange(3000), np.zeros(3000, np.int64)
    tracemalloc.start()
    found = scores(CLASSIFICATION, Predictions(right, wrong, 0.5, labels))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["accuracy"] == 1 / 3000
    assert most < 10e6
