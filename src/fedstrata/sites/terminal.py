"""Asking a site's owner on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fedstrata.sites.approval import Ask


def asking(say: Callable[[str], None]) -> Ask | None:
    """Asks on the terminal of this program; None where there is none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def ask(lines: Sequence[str]) -> bool:
        for line in lines:
            say(line)
        try:
            return input("Take part? [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    return ask
