"""What it took to reach a score, from a run's records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedstrata.cost.ledger import totals
from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.plan.streams import SERVER


@dataclass(frozen=True)
class Reached:
    """The first scored round whose score is as good as a target.

    Attributes:
        rounds: rounds played by then; 0 where the start model is as good.
        bytes: payload by then, ``up`` and ``down`` over all clients, training and evaluation, without the start
            model.
    """

    rounds: int
    bytes: dict[str, int]


def reached(
    target: float, metric: str, rounds: Iterable[Mapping[str, Any]], ledger: Iterable[Mapping[str, Any]]
) -> Reached | None:
    """When a run first reached a target; None if it never did.

    Args:
        target: value of the metric.
        metric: its name; ``loss`` and ``perplexity`` have to fall to the target, others to rise to it.
        rounds: the lines of ``rounds.jsonl``.
        ledger: the lines of ``ledger.jsonl``.
    """
    for line in rounds:
        score = line["score"].get(metric) if line["client"] == SERVER else None
        if score is not None and (score <= target if metric in LOWER_IS_BETTER else score >= target):
            spent = totals(entry for entry in ledger if entry["round"] <= line["round"])
            return Reached(line["round"] + 1, {way: spent[way] for way in ("up", "down")})
    return None
