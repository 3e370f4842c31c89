"""The order of labels, wherever they are listed."""

from __future__ import annotations

import math
from collections.abc import Iterable


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Labels in their order: numbers by value, words by the alphabet."""
    words = sorted(labels)
    try:
        numbers = [float(label) for label in words]
    except ValueError:
        return words
    return sorted(words, key=float) if all(map(math.isfinite, numbers)) else words
