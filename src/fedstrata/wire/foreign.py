"""What others send, made harmless: JSON is measured before it is parsed, text is cleaned before it is shown."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

MOST_DEPTH = 16
"""Most brackets inside one another; messages have five."""
MOST_DIGITS = 40
"""Most digits in a row outside a string: a float of 17 has an exponent of its own, no count has more than 25."""
LONGEST_TEXT = 1000
"""Most characters of a text that is shown."""

BRACKETS = str.maketrans("<>", "\u2039\u203a")
"""Those of HTML -> ones that look alike."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string; one without an end goes to the end of the text, or each quote in it would be tried as a start."""
_BRACKET = re.compile(r"[\[\]{}]")
_DIGITS = re.compile(rf"\d{{{MOST_DIGITS + 1}}}")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?", re.DOTALL)


COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys, but for a line's end and a tab, what turns the direction of writing, and halves of
characters; the name of a class or a file may hold any."""


def visible(text: str) -> str:
    """A text whose characters of :data:`COMMANDS` are spelled out, as in Python: ``\\x1b``."""
    return COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def measure_json(text: str, most: int) -> None:
    """Refuse JSON that a parser should not be given.

    Args:
        text: not yet parsed.
        most: most characters that it may have.

    Raises:
        ValueError: it is too long or too deep, or has too long a number.
    """
    if len(text) > most:
        raise ValueError(f"{len(text)} characters of JSON, at most {most} are read")
    bare = _STRING.sub("", text)
    if _DIGITS.search(bare):
        raise ValueError(f"a number of more than {MOST_DIGITS} digits")
    depth = 0
    for bracket in _BRACKET.findall(bare):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} brackets inside one another")


def read_json(content: bytes | bytearray | str, most: int) -> Any:
    """What a JSON text of at most ``most`` characters holds.

    Raises:
        ValueError: it is none, or :func:`measure_json` refuses it.
    """
    text = content if isinstance(content, str) else content.decode("utf-8")
    measure_json(text, most)
    return json.loads(text)


def plain_text(text: str, most: int = LONGEST_TEXT) -> str:
    """A text on one line, for screen, log and page.

    Without escape sequences of terminals, characters that are not printed or turn the direction of writing, and
    with other brackets in place of those of HTML.
    """
    visible = _ESCAPES.sub("", text[: 4 * most])
    printed = "".join(" " if unicodedata.category(sign)[0] in "CZ" else sign for sign in visible)
    printed = printed.translate(BRACKETS)
    return " ".join(printed.split())[:most]


def is_plain_name(name: Any, most: int = 200) -> bool:
    """Whether a name is a string of printed characters."""
    return isinstance(name, str) and 1 <= len(name) <= most and name.isprintable()
