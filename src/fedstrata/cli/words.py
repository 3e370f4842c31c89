"""What the progress of runs and sweeps says, in words. Rounds count from 1."""

from __future__ import annotations

from fedstrata.errors import four_decimals
from fedstrata.events import Baseline
from fedstrata.plan.kinds import LOWER_IS_BETTER


def round_words(round: int, rounds: int) -> str:
    """A 0-based round for a reader: ``round 1/5``, or ``before training`` for -1."""
    return f"round {round + 1}/{rounds}" if round >= 0 else "before training"


def score_lines(round: int, score: dict[str, float], rounds: int, baseline: Baseline) -> list[str]:
    """Every metric, with the baseline's after the headline; after the last round, whether it was beaten."""
    words = []
    for name, value in score.items():
        always = baseline.score.get(name) if name == baseline.headline else None
        words.append(f"{name} {four_decimals(value)}" + ("" if always is None else f" (baseline {always:.4f})"))
    lines = [f"{round_words(round, rounds)}  {'  '.join(words)}"]
    if round == rounds - 1 and not _beaten(score, baseline):
        name = baseline.headline
        lines.append(f"note: {name} {four_decimals(score[name])} is not better than predicting {baseline.what}")
    return lines


def _beaten(score: dict[str, float], baseline: Baseline) -> bool:
    """Whether a score is better by the headline, or there is nothing to beat."""
    name = baseline.headline
    if name not in baseline.score or name not in score:
        return True
    sign = -1 if name in LOWER_IS_BETTER else 1
    return sign * score[name] > sign * baseline.score[name]
