"""The figures of an attack, each with its interval of 95 % and with what chance alone would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]
LEVEL = 0.95
DRAWS = 200
"""Bootstrap samples, or random directions, of an interval."""
UNMOVED = 1e-3
"""Share of the smallest true score below which, beside scores of 0, a score counts as 0."""


@dataclass(frozen=True)
class Figure:
    """A share, an area or a distance.

    Attributes:
        value: the figure; NaN where there was nothing to count.
        low: lower end of its interval of 95 %.
        high: upper end.
        chance: what a guess without the message gives; None where that has no meaning.
        count: hits and cases behind a share; empty for other figures.
    """

    value: float
    low: float
    high: float
    chance: float | None = None
    count: tuple[int, ...] = ()

    @property
    def holds_chance(self) -> bool:
        """Whether the interval holds what chance gives."""
        return self.chance is not None and self.low <= self.chance <= self.high

    def record(self) -> dict[str, Any]:
        """As it stands in ``audit.json``: NaN is null."""
        values = asdict(self) | {"count": list(self.count), "holds_chance": self.holds_chance}
        return {key: None if isinstance(v, float) and v != v else v for key, v in values.items()}


def share(hits: int, cases: int, chance: float | None = None) -> Figure:
    """Hits among cases, with the interval of Clopper and Pearson (Biometrika 26, 1934)."""
    if not cases:
        return Figure(float("nan"), 0.0, 1.0, chance, (0, 0))
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, cases - hits + 1))
    high = 1.0 if hits == cases else float(stats.beta.ppf(1 - tail, hits + 1, cases - hits))
    return Figure(hits / cases, low, high, chance, (hits, cases))


def mean(values: Sequence[float], chance: float | None = None) -> Figure:
    """A mean of values of 0 to 1, with the interval of the percentile bootstrap over them; of one it is all."""
    if len(values) < 2:
        return Figure(float(values[0]) if len(values) else float("nan"), 0.0, 1.0, chance)
    found = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = found[rng.integers(0, len(found), (DRAWS, len(found)))].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(float(found.mean()), float(low), float(high), chance)


def distance(estimate: Floats, true: Floats) -> Figure:
    """Total variation between shares, of which chance takes all to be equal; lower is better.

    Its interval is the bootstrap's over the classes, and at least as wide as the distances of the estimate spread
    around chance where it is dealt to the classes at random. The bootstrap alone has no width for two classes,
    which are equally far off: noise would have told them every time.

    Args:
        estimate: of the share of each class, ``[C]``.
        true: the shares, ``[C]``.
    """
    half, chance = len(true) / 2, float(np.abs(1 / len(true) - true).sum() / 2)
    over_classes = mean(list(np.abs(estimate - true)))
    value = half * over_classes.value
    dealt = np.random.default_rng(0).permuted(np.tile(estimate, (DRAWS, 1)), axis=1)
    away = np.abs(dealt - true).sum(1) / 2 - chance
    spread = float(stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(np.mean(np.square(away))))
    low, high = min(half * over_classes.low, value - spread), max(half * over_classes.high, value + spread)
    return Figure(value, max(0.0, low), min(1.0, high), chance)


def exponential_mean(values: Sequence[float], chance: float, most: float) -> Figure:
    """The mean of few values of 0 to ``most`` that by chance are exponentially distributed, as exposures are.

    Its interval is that of such a mean. Five values are too few to draw from: the bootstrap's would miss chance in
    a fifth of the cases in which there is nothing else.
    """
    count, value = len(values), float(np.mean(values))
    tail = (1 - LEVEL) / 2
    low, high = (2 * count * value / float(stats.chi2.ppf(share, 2 * count)) for share in (1 - tail, tail))
    return Figure(value, low, min(most, high), chance)


def area(scores: Floats, truth: Truth) -> Figure:
    """The area under the ROC curve: how often a true case scores above another; ties count half.

    Its interval is DeLong's (Biometrics 44, 1988), on the logit's scale; where all cases are ordered right, or
    wrong, that has no width, and the end is what Clopper and Pearson give for the smaller of the two groups.
    """
    inside, outside = scores[truth], scores[~truth]
    n, m = len(inside), len(outside)
    if not n or not m:
        return Figure(float("nan"), 0.0, 1.0, 0.5)
    every = stats.rankdata(np.concatenate([inside, outside]))
    own = (every[:n] - stats.rankdata(inside)) / m
    others = 1 - (every[n:] - stats.rankdata(outside)) / n
    value = float(own.mean())
    few = min(n, m)
    if value in (0.0, 1.0):
        edge = share(few if value else 0, few)
        return Figure(value, edge.low, edge.high, 0.5)
    variance = (own.var(ddof=1) / n if n > 1 else 0.25 / n) + (others.var(ddof=1) / m if m > 1 else 0.25 / m)
    spread = float(stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(variance) / (value * (1 - value)))
    logit = float(np.log(value / (1 - value)))
    low, high = (1 / (1 + np.exp(-(logit + way * spread))) for way in (-1, 1))
    return Figure(value, float(low), float(high), 0.5)


def along_one_direction(found: Figure, rows: npt.NDArray[np.float32], truth: Truth) -> Figure:
    """The area of scores that are all projections on one direction, which :func:`area` takes for independent.

    Rows of related words point alike, so they are high or low together. Of a BERT of 12 layers and 30 to 150 words
    of a text, noise alone has areas with a standard deviation of 0.1, and DeLong's interval holds 0.5 half the
    time. So the interval becomes at least as wide as areas along random directions spread around 0.5.

    Args:
        found: the area.
        rows: of unit length, one for each case, ``[n, H]``.
        truth: which cases are true, ``[n]``.
    """
    if not 0 < truth.sum() < len(truth):
        return found
    directions = np.random.default_rng(0).standard_normal((DRAWS, rows.shape[1]), np.float32)
    away = [_rank_area(rows @ direction, truth) - 0.5 for direction in directions]
    spread = float(stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(np.mean(np.square(away))))
    low, high = min(found.low, found.value - spread), max(found.high, found.value + spread)
    return replace(found, low=max(0.0, low), high=min(1.0, high))


def _rank_area(scores: npt.NDArray[np.float32], truth: Truth) -> float:
    """An area alone."""
    n = int(truth.sum())
    return float((stats.rankdata(scores)[truth].mean() - (n + 1) / 2) / (len(truth) - n))


def best_threshold(scores: Floats, truth: Truth) -> float:
    """The score from which on "true" gives the largest F1; infinite where nothing is true.

    It lies between two scores: in the middle by their ratio, and far down where the lower one is 0, which is what
    a weight gets that nothing has moved. Found on public text alone, and then used on what a client has sent.
    """
    if not truth.any():
        return float("inf")
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(truth[order])
    ends = np.append(ranked[1:] < ranked[:-1], True)  # equal scores are taken together
    f1 = np.where(ends, 2 * hits / (np.arange(1, len(ranked) + 1) + truth.sum()), 0.0)
    last = int(f1.argmax())
    if last + 1 == len(ranked):
        return float(ranked[last])
    upper, lower = float(ranked[last]), float(ranked[last + 1])
    if lower > 0:
        return float(np.sqrt(upper * lower))
    return UNMOVED * upper if lower == 0 else (upper + lower) / 2


def detection(scores: Floats, truth: Truth, threshold: float, guess: Truth | None = None) -> dict[str, Figure]:
    """Precision, recall and area of a detector over cases.

    Args:
        scores: high where the attack says "true", ``[n]``.
        truth: which cases are true, ``[n]``.
        threshold: from which score on it says so.
        guess: the same cases without the message, such as the commonest tokens of public text. The figures'
            ``chance`` is the larger of its precision and recall and of those of as many cases as the attack names,
            drawn at random: who names every case finds every true one.
    """
    said = scores >= threshold
    hits, precision, recall = int((said & truth).sum()), float(truth.mean()), float(said.mean())
    if guess is not None:
        right = int((guess & truth).sum())
        precision = max(precision, right / max(1, int(guess.sum())))
        recall = max(recall, right / max(1, int(truth.sum())))
    return {
        "precision": share(hits, int(said.sum()), precision),
        "recall": share(hits, int(truth.sum()), recall),
        "auc": area(scores, truth),
    }


def common_sequence(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for item in one:
        before = 0
        for place, against in enumerate(other, 1):
            before, row[place] = row[place], before + 1 if item == against else max(row[place], row[place - 1])
    return row[-1]


def rouge_l(read: Sequence[int], true: Sequence[int]) -> float:
    """ROUGE-L's F of a text's tokens (Lin 2004): 1 for the same text, 0 where nothing is common."""
    return 2 * common_sequence(read, true) / max(1, len(read) + len(true))
