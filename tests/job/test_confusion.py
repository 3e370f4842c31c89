"""Scores of classes, held to scikit-learn's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from sklearn import metrics

from fedstrata.job.confusion import class_scores, confusion, matthews_coefficient

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
    matrix = confusion(truth, guess, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one class alone
        assert matrix.tolist() == metrics.confusion_matrix(truth, guess, labels=every).tolist()
        expected = metrics.precision_recall_fscore_support(truth, guess, labels=every, zero_division=0.0)
        correlation = metrics.matthews_corrcoef(truth, guess)
    for ours, theirs in zip(class_scores(matrix), expected, strict=True):
        assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-15)
    assert matthews_coefficient(matrix) == pytest.approx(correlation, abs=1e-12)
