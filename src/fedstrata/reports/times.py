"""Times in words: how long, how much is left, until when; ``?`` where a number is no time."""

from __future__ import annotations

import time

MOST_SECONDS = 1e11
"""Three thousand years."""


def duration(seconds: float) -> str:
    """Seconds as ``4.2 s``, ``12 min``, ``3 h 05 min`` or ``4 days``."""
    if not seconds < MOST_SECONDS:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02} min" if hours < 48 else f"{round(minutes / 1440)} days"


def left_words(seconds: float) -> str:
    """An estimate: ``about 12 min left``."""
    return f"about {duration(seconds)} left"


def time_left(since: float, done: float, total: float) -> str:
    """What is left of ``total`` if it goes on as since a monotonic time; empty where nothing can be said."""
    seconds = time.monotonic() - since
    return left_words(seconds * (total - done) / done) if 0 < done < total else ""


def clock(seconds: float) -> str:
    """The time of day in so many seconds; with the date if that is not today."""
    now = time.time()
    if not -MOST_SECONDS < seconds < MOST_SECONDS:
        return "?"
    then = time.localtime(now + seconds)
    today = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)
