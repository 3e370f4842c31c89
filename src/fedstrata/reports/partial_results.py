"""The result of a run that did not live to write one: the same keys, from what it had recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.cost.ledger import totals
from fedstrata.plan.streams import SERVER

SETUP = "setup"
"""The phase of the initial download, the start model; no total of a run counts it."""


def result_of_records(
    job: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """From the lines of ``rounds.jsonl`` and ``ledger.jsonl``.

    Args:
        job: the resolved job, as far as it was written.
        rounds: one line per round and client, and one per scored round.
        ledger: one line per transfer.
    """
    scores = [line["score"] for line in rounds if line["client"] == SERVER and line.get("score")]
    score = scores[-1] if scores else {}
    return {
        "status": "stopped",
        "message": None,
        "stage": job.get("stage", ""),
        "method": job.get("method", {}).get("name", ""),
        "task": job.get("task", {}).get("kind", ""),
        "headline": job.get("task", {}).get("metric") or next(iter(score), ""),
        "score": score,
        "rounds": 1 + max((line["round"] for line in rounds), default=-1),
        "bytes": totals(ledger),
        "flops": sum(line.get("flops", 0) + line.get("server_flops", 0) for line in rounds),
        "seconds": sum(line.get("seconds", 0.0) for line in rounds),
        "clients": {
            line["client"]: {"examples": line["examples"], "score": None}
            for line in rounds
            if line["client"] != SERVER
        },
    }


def result_of_stages(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From the results of the stages: scores are those of the last, costs are sums."""
    return {
        **results[-1],
        "status": "stopped",
        "bytes": {key: sum(r["bytes"][key] for r in results) for key in ("up", "down", SETUP)},
        "flops": sum(r["flops"] for r in results),
        "seconds": sum(r["seconds"] for r in results),
    }
