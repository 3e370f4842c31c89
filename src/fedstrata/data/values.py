"""What a single value of a column is."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

DATE = re.compile(r"(\d{4}([-./])\d{1,2}\2\d{1,2}|\d{1,2}([-./])\d{1,2}\3(\d{4}|\d{2}))([T ].*)?")


def is_filled(value: Any) -> bool:
    """Whether a row has a value: none is missing, NaN or blank."""
    return bool(value is not None and value == value and str(value).strip())


def is_date(value: Any) -> bool:
    """Whether a value is a day, maybe with a time: a date of Excel or Parquet, or a text such as 31.03.2024."""
    return isinstance(value, datetime.date) or bool(DATE.fullmatch(str(value).strip()))


def is_number(value: Any) -> bool:
    """Whether a value is a number, also one with a decimal comma."""
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value):
        return True
    try:
        return "_" not in str(value) and math.isfinite(float(value))  # Python alone takes 1_5 for a number
    except (TypeError, ValueError):
        return False


def is_latin(text: str) -> bool:
    """Whether most letters are Latin ones."""
    letters = [letter for letter in text if letter.isalpha()]
    return not letters or sum(letter < "\u0250" for letter in letters) > len(letters) / 2
