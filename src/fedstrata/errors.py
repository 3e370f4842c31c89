"""The one exception for what a user can put right, and words for its sentences."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MOST_LISTED = 50
"""Words that a sentence lists: more than there are of any kind but clients, classes and columns."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a disk takes no more: the machine's fault, exit code 1."""

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What it says of a place where nobody, or not this user, may write: another can be named, exit code 2."""


class UserError(Exception):
    """Invalid input, reported in one sentence: what is wrong, where, and what is expected.

    The command line prints the sentence and exits with code 2; no traceback.
    """


class TokenizerError(UserError):
    """A model's tokenizer does not take the texts; what its library raised is the ``__cause__``.

    A site does not send its server such a sentence: a server could ask by it what its texts hold.
    """


def failed(error: BaseException) -> bool:
    """Whether this is an Exception, or the panic of a library in Rust, which is none; and no wish to stop."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def tokenizing(name: str) -> Iterator[None]:
    """Inside, what a model's tokenizer raises, or panics with, is a sentence; want of memory stays what it is."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, MemoryError) or not failed(error):
            raise
        raise TokenizerError(
            f"model {name}: its tokenizer fails on a text ({first_words(error)}); expected one that takes any text"
        ) from error


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Sentences about what is done inside begin with where it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def did_you_mean(found: object, expected: Iterable[str]) -> str:
    """The tail of a sentence that lists the expected words, and names the one nearest to what was found."""
    import difflib  # here: whoever imports the package waits for as little as possible

    words = [str(word) for word in expected]
    near = difflib.get_close_matches(str(found), words, n=1)
    expected_words = f"expected one of: {listed(words)}"
    return f"did you mean {near[0]!r}? ({expected_words})" if near else expected_words


def listed(expected: Iterable[str]) -> str:
    """Words between commas, and of many how many more there are."""
    words = list(expected)
    more = f", and {len(words) - MOST_LISTED:,} more" if len(words) > MOST_LISTED else ""
    return ", ".join(words[:MOST_LISTED]) + more


def plural(number: int, noun: str) -> str:
    """A number and what it counts: ``1 row``, ``1,200 rows``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def four_decimals(value: float) -> str:
    """A score to four decimals; four digits of a perplexity of millions, as of a model that has diverged."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def megabytes(count: int) -> str:
    """Bytes as ``3.1 MB``; few of them, as adapters and changes in few bits are, as ``0.046 MB``."""
    if 0 < count < 1000:
        return "<0.001 MB"
    return f"{count / 1e6:.3f} MB" if 0 < count < 1e5 else f"{count / 1e6:,.1f} MB"


def first_words(error: BaseException) -> str:
    """What a library says first, without the name of Python's exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return re.sub(r"^(\w*Error:?|Exception:) ", "", said).rstrip(".")
