"""The figures against counting by hand, scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score, roc_auc_score

from fedstrata.audits.figures import (
    along_one_direction,
    area,
    best_threshold,
    common_sequence,
    detection,
    distance,
    mean,
    rouge_l,
    share,
)


@pytest.mark.parametrize(("hits", "cases"), [(0, 10), (3, 10), (10, 10), (796, 796), (1, 2)])
def test_shares_have_the_interval_of_clopper_and_pearson(hits: int, cases: int) -> None:
    found, exact = share(hits, cases), stats.binomtest(hits, cases).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert found.value == hits / cases


def test_the_area_is_scikit_learns_and_its_interval_covers() -> None:
    draw = np.random.default_rng(0)
    missed = 0
    for _ in range(200):
        truth = np.arange(60) < 20
        scores = np.round(draw.normal(size=60) + truth, 1)
        found = area(scores, truth)
        assert found.value == pytest.approx(roc_auc_score(truth, scores))
        missed += not found.low <= stats.norm.cdf(1 / np.sqrt(2)) <= found.high
    assert missed <= 20  # of 200 at 95 %: more than 20 has a chance of 1 in 1,000


def test_noise_holds_chance_and_a_signal_does_not() -> None:
    draw = np.random.default_rng(5)
    truth = np.arange(3000) < 300
    noise, signal = area(draw.normal(size=3000), truth), area(draw.normal(size=3000) + truth, truth)
    assert noise.holds_chance
    assert not signal.holds_chance
    assert not area(truth.astype(float), truth).holds_chance


@pytest.mark.parametrize("classes", [2, 3, 5, 23])
def test_a_distance_of_shares_holds_chance_under_noise(classes: int) -> None:
    """With two classes, which are equally far off, the bootstrap has no width, and with few hardly any."""
    draw = np.random.default_rng(7)
    kept = 0
    for _ in range(100):
        true = np.bincount(draw.integers(0, classes, 8), minlength=classes) / 8
        guessed = np.maximum(draw.normal(1 / classes, 1, classes), 1e-9)
        kept += distance(guessed / guessed.sum(), true).holds_chance
    assert kept >= 90
    found = distance(np.eye(23)[0] * 0.9 + 0.1 / 23, np.eye(23)[0])
    assert found.value == pytest.approx(0.1 * 22 / 23)
    assert not found.holds_chance


def test_an_area_along_one_direction_holds_chance_under_noise() -> None:
    """Rows of the true cases point alike: as independent cases they were told from others by noise alone."""
    draw = np.random.default_rng(6)
    truth = np.arange(400) < 40
    rows = draw.normal(size=(400, 16)) + truth[:, None] * draw.normal(size=16)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    held = {"alone": 0, "along": 0}
    for _ in range(100):
        found = area(rows @ draw.normal(size=16), truth)
        held["alone"] += found.holds_chance
        held["along"] += along_one_direction(found, rows, truth).holds_chance
    assert held["alone"] < 50
    assert held["along"] >= 90  # of 100 at 95 %: fewer than 90 has a chance of 1 in 100
    apart = np.where(truth, 1.0, -1.0)
    told = along_one_direction(area(apart, truth), rows, truth)
    assert (told.value, told.holds_chance) == (1.0, False)


def test_the_threshold_gives_the_largest_f1_of_all() -> None:
    draw = np.random.default_rng(2)
    truth = draw.random(80) < 0.3
    scores = np.round(draw.normal(size=80) + truth, 1)
    best = max(f1_score(truth, scores >= level) for level in np.unique(scores))
    assert f1_score(truth, scores >= best_threshold(scores, truth)) == pytest.approx(best)


def test_beside_zeros_the_threshold_lies_far_below_the_smallest_true_score() -> None:
    scores = np.array([0.0, 0.0, 2e-4, 1e-2])
    assert 0 < best_threshold(scores, scores > 0) < 1e-6
    assert best_threshold(scores, np.zeros(4, bool)) == float("inf")


def test_a_detection_counts_hits_and_what_the_guess_would_hit() -> None:
    truth = np.array([True, True, False, False, False])
    found = detection(np.array([3.0, 1.0, 2.0, 0.0, 0.0]), truth, 1.5, np.array([False, True, True, True, False]))
    assert found["precision"].count == (1, 2)
    assert found["recall"].count == (1, 2)
    assert found["precision"].chance == pytest.approx(2 / 5), "of a draw at random; the guess has 1 of 3"
    assert found["recall"].chance == pytest.approx(1 / 2)
    assert found["auc"].value == pytest.approx(5 / 6)


@pytest.mark.parametrize("threshold", [-9.0, -1.0, 0.0, 1.5])
def test_scores_that_know_nothing_are_no_better_than_chance(threshold: float) -> None:
    """Under noise a threshold of public text may name every token: all that stand in the texts are among them."""
    draw, above = np.random.default_rng(0), 0
    truth, guess = np.arange(200) < 30, np.arange(200) % 20 == 0
    for _ in range(200):
        found = detection(draw.normal(size=200), truth, threshold, guess)
        figures = [found[name] for name in ("precision", "recall")]
        above += sum(one.chance is not None and one.low > one.chance for one in figures)
    assert above <= 0.05 * 400


def test_rouge_of_texts() -> None:
    assert common_sequence([1, 2, 3, 4], [2, 9, 4]) == 2
    assert rouge_l([1, 2, 3], [1, 2, 3]) == 1.0
    assert rouge_l([1, 2], [3, 4]) == 0.0
    assert rouge_l([1, 2, 3, 4], [2, 9, 4]) == pytest.approx(4 / 7)
    assert mean([1.0, 0.0, 1.0, 0.0]).low < 0.5 < mean([1.0, 0.0, 1.0, 0.0]).high
    one = mean([0.3])  # a step of one text: its interval had no width
    assert (one.value, one.low, one.high) == (0.3, 0.0, 1.0)
