"""Who holds what: ``partition.json`` of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedstrata.client.setup import Ready
from fedstrata.data.prepare import Prepared, population
from fedstrata.job.tables import Job


def holdings(job: Job, ready: Ready, data: Prepared, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Who holds how many rows, examples and labels.

    Args:
        job: the stage's job.
        ready: the examples that are here.
        data: their rows.
        sizes: client -> number of its examples.
    """
    clients: dict[str, Any] = {name: {"rows": n, "examples": n, "labels": None} for name, n in sizes.items()}
    shards = population(job.method.population, data.shards)
    for client, index in ready.shards.items():
        rows = shards[client]
        labels = None if data.by is None else dict(sorted(Counter(data.by[i] for i in rows).items()))
        clients[client] = {"rows": len(rows), "examples": len(index), "labels": labels}
    tests = {name: len(index) for own in ready.tests.values() for name, index in own.items()}
    test = sum(tests.values()) if tests else len(ready.test)
    return {"clients": clients, "test": test, "tests": tests, "left_out": data.dropped}
