"""Discrete Gaussian numbers against their probabilities, and what a sum of them promises."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedstrata.privacy.discrete import MOST_DEVIATION, _exp_coins, discrete_gaussian
from fedstrata.privacy.keystream import Keystream

KEY = bytes(32)


@pytest.mark.parametrize(("above", "below"), [(0, 7), (3, 7), (7, 7), (30, 7), (1, 1)])
def test_coins_come_up_as_often_as_they_should(above: int, below: int) -> None:
    count, share = 200_000, np.exp(-above / below)
    found = int(_exp_coins(np.full(count, above), below, Keystream(KEY)).sum())
    assert abs(found - count * share) <= 4.5 * np.sqrt(count * share * (1 - share)) + 1e-9


@pytest.mark.parametrize("deviation", [4, 9])
def test_numbers_have_their_probabilities(deviation: int) -> None:
    count = 300_000
    drawn = discrete_gaussian(count, deviation, Keystream(KEY))
    values = np.arange(-5 * deviation, 5 * deviation + 1)
    expected = np.exp(-(values**2) / (2 * deviation**2))
    expected = expected / np.exp(-(np.arange(-200, 201) ** 2) / (2 * deviation**2)).sum() * count
    found = np.array([(drawn == value).sum() for value in values])
    often = expected > 10
    chi = ((found - expected)[often] ** 2 / expected[often]).sum()
    assert stats.chi2.sf(chi, int(often.sum()) - 1) > 1e-3
    assert np.abs(drawn).max() < 7 * deviation


def test_large_deviations_are_gaussian() -> None:
    drawn = discrete_gaussian(50_000, MOST_DEVIATION, Keystream(KEY)) / MOST_DEVIATION
    assert stats.kstest(drawn, "norm").pvalue > 1e-3


def test_a_deviation_out_of_bounds_is_refused() -> None:
    for deviation in (3, MOST_DEVIATION + 1):
        with pytest.raises(ValueError, match="deviation"):
            discrete_gaussian(1, deviation, Keystream(KEY))
