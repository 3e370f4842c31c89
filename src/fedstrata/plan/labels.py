"""The order of labels, wherever they are listed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Labels in their order: numbers by value, words by the alphabet."""
    words = sorted(labels)
    try:
        numbers = [float(label) for label in words]
    except ValueError:
        return words
    return sorted(words, key=float) if all(map(math.isfinite, numbers)) else words


def alike(labels: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Pairs of labels that seem to be one, and in what they differ."""
    for how, form in (
        ("differ in blanks alone", str.strip),
        ("differ in capital letters alone", str.casefold),
        ("are the same number", _number),
    ):
        seen: dict[str, str] = {}
        for label in sorted(labels):
            if (first := seen.setdefault(form(label), label)) != label:
                yield first, label, how


def _number(label: str) -> str:
    try:
        return str(float(label))
    except ValueError:
        return label
