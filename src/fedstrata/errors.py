"""The one exception for what a user can put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input, told in one sentence: what is wrong, where, and what is legal.

    The command line prints the sentence and exits with code 2; no traceback.
    """


def did_you_mean(found: str, legal: Iterable[str]) -> str:
    """The tail of a sentence that names the legal words and the nearest one to what was found."""
    words = [str(word) for word in legal]
    near = difflib.get_close_matches(found, words, n=1)
    listed = ", ".join(words)
    return f"did you mean {near[0]!r}? (expected one of: {listed})" if near else f"expected one of: {listed}"
