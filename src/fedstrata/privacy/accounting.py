"""What noise promises: epsilon of Gaussian noise, and the noise of an epsilon, by dp-accounting.

Neighbors differ by one unit that is there or not there (add or remove one): one training example, or what one
client's data changes. Replacing a unit by another counts as if the noise were half. Figures are upper bounds.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fedstrata.errors import UserError

Accountant = Literal["pld", "rdp"]

INSTALL = "[privacy] level: noise is accounted for by the extra 'privacy': pip install 'fedstrata[privacy]'"
LOOSE = 100.0
"""Epsilon beyond which Rényi's bound is told, whatever the accountant: no finer one makes it a protection."""
STEP = 1e-3
"""Of the privacy losses that PLD counts; its bound grows by about as much, and it takes a tenth of the time."""
TOLERANCE = 5e-3
"""Calibrated noise is at most by this share larger than it has to be."""
MOST_NOISE, LEAST_NOISE = 1e6, 1e-3


@dataclass(frozen=True)
class Spending:
    """Releases of the same kind about one unit.

    Attributes:
        noise: standard deviation of the noise, in units of the most that the unit can change.
        rate: probability that the unit takes part in a release, drawn anew each time (Poisson sampling).
        count: number of releases.
    """

    noise: float
    rate: float
    count: int


def epsilon_of(spent: Iterable[Spending], delta: float, accountant: Accountant) -> float:
    """Epsilon of everything spent on one unit together; 0 for nothing.

    Raises:
        UserError: dp-accounting is not installed.
    """
    counts = Counter[tuple[float, float]]()
    for one in spent:
        counts[one.noise, one.rate] += one.count
    return _epsilon(tuple(sorted((key, count) for key, count in counts.items() if count)), delta, accountant)


@functools.lru_cache(1 << 14)
def _epsilon(spent: tuple[tuple[tuple[float, float], int], ...], delta: float, accountant: Accountant) -> float:
    if not spent:
        return 0.0
    library = _library()
    if accountant == "pld" and all(rate == 1 for (_, rate), _ in spent):
        # n Gaussian releases are one with the noise divided by sqrt(n), whose epsilon is known in closed form
        precision = sum(count / noise**2 for (noise, _), count in spent)
        return max(0.0, float(library.get_epsilon_gaussian(precision**-0.5, delta)))
    bound = _composed(library.rdp.RdpAccountant(), spent, delta)
    if accountant == "rdp" or bound > LOOSE:
        return bound
    return min(bound, _composed(library.pld.PLDAccountant(value_discretization_interval=STEP), spent, delta))


def _composed(accountant: Any, spent: Iterable[tuple[tuple[float, float], int]], delta: float) -> float:
    library = _library()
    for (noise, rate), count in spent:
        event = library.GaussianDpEvent(noise)
        if rate < 1:
            event = library.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, count)
    return max(0.0, float(accountant.get_epsilon(delta)))


@functools.lru_cache(1 << 12)
def calibrate(epsilon: float, delta: float, accountant: Accountant, rate: float, count: int) -> float:
    """The least noise with which ``count`` releases at ``rate`` spend at most ``epsilon``.

    Args:
        epsilon: what may be spent.
        delta: for this delta.
        accountant: by this accountant.
        rate: as of :class:`Spending`.
        count: number of releases.

    Raises:
        UserError: no noise that makes sense is enough, or dp-accounting is not installed.
    """

    def spends(noise: float) -> float:
        return epsilon_of([Spending(noise, rate, count)], delta, accountant)

    if count < 1:
        return LEAST_NOISE
    # Rényi's bound is quick and never far above: the search by a finer accountant begins below its noise
    quick = _least(lambda noise: epsilon_of([Spending(noise, rate, count)], delta, "rdp"), epsilon, 1.0)
    return quick if accountant == "rdp" else _least(spends, epsilon, quick)


def _least(spends: Callable[[float], float], epsilon: float, guess: float) -> float:
    """The least noise that spends at most ``epsilon``; it is bracketed from a guess, then halved."""
    enough = guess
    while spends(enough) > epsilon:
        enough *= 1.5
        if enough > MOST_NOISE:
            raise UserError(f"[privacy] epsilon: no noise is enough for {epsilon:g}; expected a larger one")
    less = enough / 1.2
    while less > LEAST_NOISE and spends(less) <= epsilon:
        enough, less = less, less / 1.2
    if less <= LEAST_NOISE:
        return enough
    while enough / less > 1 + TOLERANCE:
        middle = math.sqrt(less * enough)
        less, enough = (less, middle) if spends(middle) <= epsilon else (middle, enough)
    return enough


@functools.cache
def _library() -> Any:
    """The library dp-accounting.

    Raises:
        UserError: it is not installed.
    """
    try:
        import dp_accounting  # here: only runs with noise need it
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise UserError(INSTALL) from None
    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that do not converge are left out: a looser bound
    return dp_accounting
