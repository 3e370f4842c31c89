"""Discrete Gaussian noise: integers, drawn exactly, for sums of integers.

The sampler is that of Canonne, Kamath and Steinke 2020 (algorithms 1 to 3), over arrays: every coin compares
integers, nothing is rounded. The sum of m such numbers of deviation s promises what Gaussian noise of s sqrt(m)
does, by Rényi's divergences, but for a term below e^(-9 s^2) (Kairouz, Liu and Steinke 2021, theorem 1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedstrata.privacy.keystream import Keystream

Integers = npt.NDArray[np.int64]
Coins = npt.NDArray[np.bool_]

LEAST_DEVIATION, MOST_DEVIATION = 4, 1 << 24
"""Between these the term above is 0 in fp64, and no product below exceeds 64 bits."""
PIECE = 1 << 16
"""Numbers drawn at a time: so few that what they are made of stays in a core's cache."""


def discrete_gaussian(count: int, deviation: int, stream: Keystream) -> Integers:
    """Independent integers x with probability proportional to exp(-x^2 / (2 deviation^2)).

    Raises:
        ValueError: the deviation is out of its bounds.
    """
    if not LEAST_DEVIATION <= deviation <= MOST_DEVIATION:
        raise ValueError(f"deviation {deviation}; expected {LEAST_DEVIATION} to {MOST_DEVIATION}")
    found = np.empty(count, np.int64)
    for start in range(0, count, PIECE):
        found[start : start + PIECE] = _accepted(min(PIECE, count - start), deviation, stream)
    return found


def _accepted(count: int, deviation: int, stream: Keystream) -> Integers:
    """Discrete Laplace numbers of scale ``deviation``, each kept with the probability that makes them Gaussian."""
    found, done = np.empty(count, np.int64), 0
    while done < count:
        drawn = _laplace(2 * (count - done) + 16, deviation, stream)
        above = np.abs(drawn) - deviation
        kept = drawn[_exp_coins(above * above, 2 * deviation * deviation, stream)][: count - done]
        found[done : done + len(kept)] = kept
        done += len(kept)
    return found


def _laplace(count: int, scale: int, stream: Keystream) -> Integers:
    """Some of ``count`` tries: integers x with probability proportional to exp(-abs(x) / scale)."""
    low = stream.integers(scale, count)
    low = low[_exp_coins(low, scale, stream)]
    high = np.zeros(len(low), np.int64)
    going = np.arange(len(low))
    while len(going):
        going = going[_exp_coins(np.ones(len(going), np.int64), 1, stream)]
        high[going] += 1
    size = low + scale * high
    negative = stream.integers(2, len(size)).astype(bool)
    chosen = ~(negative & (size == 0))  # or 0 would come twice as often
    signed: Integers = np.where(negative, -size, size)[chosen]
    return signed


def _exp_coins(above: Integers, below: int, stream: Keystream) -> Coins:
    """Coins that are true with probability exp(-above / below), each of its own."""
    whole, rest = above // below, above % below
    result = _small_coins(rest, below, stream)
    going = np.flatnonzero(result & (whole > 0))
    left = whole[going]
    while len(going):  # e to an integer is a product of so many coins
        kept = _small_coins(np.full(len(going), below), below, stream)
        result[going[~kept]] = False
        going, left = going[kept], left[kept] - 1
        going, left = going[left > 0], left[left > 0]
    return result


def _small_coins(above: Integers, below: int, stream: Keystream) -> Coins:
    """Coins that are true with probability exp(-above / below), for ``above`` of 0 to ``below``.

    One counts how long coins of ``above / (below k)``, k = 1, 2, …, come up; the count is even so often.
    """
    count = np.zeros(len(above), np.int64)
    going, k = np.arange(len(above)), 1
    while len(going):
        going = going[stream.integers(below * k, len(going)) < above[going]]
        count[going] += 1
        k += 1
    even: Coins = count % 2 == 0
    return even
