"""Equivalence of two methods: the two one-sided tests, and how likely they are to show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided t-tests of paired differences (Schuirmann 1987).

    Attributes:
        mean: of the differences, "better" being positive.
        low, high: the interval with confidence 1 - 2 alpha.
        p: the larger of the two tests' p; below alpha exactly if the interval lies within the margin.
        p_no_worse: of the test against being worse by the margin or more.
        verdict: ``equal``: the interval lies within the margin; ``better``: above it; ``worse``: below it;
            ``no worse``: above minus the margin; else ``not shown``.
    """

    mean: float
    low: float
    high: float
    p: float
    p_no_worse: float
    verdict: str


def equivalence(differences: Sequence[float], margin: float, alpha: float) -> Equivalence | None:
    """Test differences of scores, one per seed; None with fewer than two."""
    count = len(differences)
    if count < 2:
        return None
    mean, error = fmean(differences), stdev(differences) / math.sqrt(count)
    reach = float(stats.t.ppf(1 - alpha, count - 1)) * error
    low, high = mean - reach, mean + reach
    p_low, p_high = (_tail(distance, error, count - 1) for distance in (mean + margin, margin - mean))
    if -margin < low and high < margin:
        verdict = "equal"
    elif low > margin:
        verdict = "better"
    elif high < -margin:
        verdict = "worse"
    else:
        verdict = "no worse" if low > -margin else "not shown"
    return Equivalence(mean, low, high, max(p_low, p_high), p_low, verdict)


def _tail(distance: float, error: float, freedom: int) -> float:
    """p of a one-sided t-test whose mean lies ``distance`` beyond the bound."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(distance / error, freedom))


def power(margin: float, error: float, freedom: int, alpha: float, difference: float = 0.0) -> float:
    """The probability that two one-sided t-tests show equivalence.

    The average over the standard error's chi distribution of the probability that the mean lies within the
    margin less t times that error (Owen 1965; Phillips 1990, J. Pharmacokinet. Biopharm. 18(2)).

    Args:
        margin: of equivalence, both ways.
        error: true standard error of the mean difference.
        freedom: degrees of freedom of its estimate.
        alpha: of each test.
        difference: the true difference.
    """
    if error == 0:
        return float(abs(difference) < margin)
    quantile = float(stats.t.ppf(1 - alpha, freedom))
    most = min(margin / (error * quantile), math.sqrt(float(stats.chi2.isf(1e-12, freedom)) / freedom))
    ratios = np.linspace(0.0, most, 20_001)  # of the estimated to the true error
    density = stats.chi.pdf(ratios * math.sqrt(freedom), freedom) * math.sqrt(freedom)
    room = margin - quantile * error * ratios
    within = stats.norm.cdf((room - difference) / error) - stats.norm.cdf((-room - difference) / error)
    return float(np.trapezoid(density * within.clip(0), ratios))


def power_no_worse(margin: float, error: float, freedom: int, alpha: float) -> float:
    """The probability that the one-sided t-test shows "no worse" of two methods that are equal."""
    if error == 0:
        return 1.0
    return float(stats.nct.sf(stats.t.ppf(1 - alpha, freedom), freedom, margin / error))


def planned_power(rows: int, seeds: int, sd_row: float, sd_seed: float, margin: float, alpha: float) -> float:
    """Power for two methods that are equal, where each seed is scored on its own share of the test rows.

    Args:
        rows: test rows in all.
        seeds: pairs of runs.
        sd_row: standard deviation of the difference of one row's scores.
        sd_seed: of the true scores of one seed's pair of runs.
        margin: of equivalence.
        alpha: of each test.
    """
    variance = sd_row**2 / (rows / seeds) + sd_seed**2
    return power(margin, math.sqrt(variance / seeds), seeds - 1, alpha)


def rows_needed(
    wanted: float, seeds: int, sd_row: float, sd_seed: float, margin: float, alpha: float
) -> int | None:
    """The fewest test rows with this power, to two digits; None where no number of rows is enough."""
    for exponent in range(1, 7):
        for digits in range(10, 100):
            rows = digits * 10**exponent
            if rows >= seeds and planned_power(rows, seeds, sd_row, sd_seed, margin, alpha) >= wanted:
                return rows
    return None


def seeds_needed(wanted: float, spread: float, margin: float, alpha: float, most: int = 100) -> int | None:
    """The fewest seeds with this power where the differences have the standard deviation ``spread``."""
    for seeds in range(2, most + 1):
        if power(margin, spread / math.sqrt(seeds), seeds - 1, alpha) >= wanted:
            return seeds
    return None
