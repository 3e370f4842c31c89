"""What the progress of runs and sweeps says, in words. Rounds count from 1."""

from __future__ import annotations

import time

from fedstrata.events import Baseline
from fedstrata.plan.kinds import LOWER_IS_BETTER


def round_words(round: int, rounds: int) -> str:
    """A 0-based round for a reader: ``round 1/5``, or ``before training`` for -1."""
    return f"round {round + 1}/{rounds}" if round >= 0 else "before training"


def megabytes(count: int) -> str:
    """Bytes as ``3.1 MB``."""
    return f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds as ``4.2 s``, ``12 min``, ``3 h 05 min`` or ``4 days``."""
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
    then = time.localtime(now + seconds)
    today = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def score_lines(round: int, score: dict[str, float], rounds: int, baseline: Baseline) -> list[str]:
    """Every metric, with the baseline's after the headline; after the last round, whether it was beaten."""
    words = []
    for name, value in score.items():
        always = baseline.score.get(name) if name == baseline.headline else None
        words.append(f"{name} {value:.4f}" + ("" if always is None else f" (baseline {always:.4f})"))
    lines = [f"{round_words(round, rounds)}  {'  '.join(words)}"]
    if round == rounds - 1 and not _beaten(score, baseline):
        name = baseline.headline
        lines.append(f"note: {name} {score[name]:.4f} is not better than {baseline.what}")
    return lines


def _beaten(score: dict[str, float], baseline: Baseline) -> bool:
    """Whether a score is better by the headline, or there is nothing to beat."""
    name = baseline.headline
    if name not in baseline.score or name not in score:
        return True
    sign = -1 if name in LOWER_IS_BETTER else 1
    return sign * score[name] > sign * baseline.score[name]
