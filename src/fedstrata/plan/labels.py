"""The order of labels, wherever they are listed."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Context, Decimal

BLANK_LETTERS = re.compile("[\u034f\u115f\u1160\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""What Unicode counts among letters and marks, and has no shape: fillers, joiners, selectors of variants."""


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Labels in their order: numbers by value, words by the alphabet."""
    words = sorted(labels)
    try:
        numbers = [float(label) for label in words]
    except ValueError:
        return words
    return sorted(words, key=float) if all(map(math.isfinite, numbers)) else words


def alike(labels: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Pairs of labels that seem to be one, and in what they differ; each pair once."""
    words, told = sorted(labels), set[tuple[str, str]]()
    for how, form in FORMS.items():
        seen: dict[str, str] = {}
        for label in words:
            first = seen.setdefault(form(label), label)
            if first != label and (first, label) not in told:
                told.add((first, label))
                yield first, label, how


def _unicode(label: str) -> str:
    return unicodedata.normalize("NFKC", label)


def _seen(label: str) -> str:
    """What a reader sees of a label: no zero-width space or joiner, soft hyphen, mark of direction or control."""
    seen = BLANK_LETTERS.sub("", label)
    return seen if seen.isprintable() else "".join(sign for sign in seen if _shown(sign))


def _shown(sign: str) -> bool:
    return sign.isspace() or unicodedata.category(sign) not in ("Cc", "Cf")


def _number(label: str) -> str:
    if "_" in label:
        return label  # Python alone takes 1_1, as codes may be written, for 11
    try:
        return str(Decimal(label).normalize(Context(prec=len(label))))  # a float has fewer digits than ids
    except ArithmeticError:
        return label


def _truth(label: str) -> str:
    return {"true": "1", "false": "0"}.get(label.strip().casefold(), label)


FORMS: Mapping[str, Callable[[str], str]] = {
    "differ in Unicode form alone": _unicode,
    "differ in characters that are not shown alone": _seen,
    "differ in blanks alone": str.strip,
    "differ in capital letters alone": str.casefold,
    "differ in blanks, capital letters or Unicode form alone": lambda label: _unicode(label).strip().casefold(),
    "differ in characters that are not shown, blanks, capital letters or Unicode form alone": (
        lambda label: _unicode(_seen(label)).strip().casefold()
    ),
    "are the same number": _number,
    "are the same truth value": _truth,
}
"""In what two labels that seem to be one differ -> what they then have in common."""
