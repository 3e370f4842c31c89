"""Who holds what: ``partition.json`` of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedstrata.client.facts import baseline, facts_and_lines
from fedstrata.client.setup import Ready
from fedstrata.data.prepare import Prepared, population
from fedstrata.events import Baseline
from fedstrata.job.tables import Job
from fedstrata.plan.messages import Engine
from fedstrata.runs.result_file import read_partition
from fedstrata.sites.engine import RemoteEngine
from fedstrata.wire.files import write_bytes


def facts_of(
    folder: Path, job: Job, ready: Ready, data: Prepared, sizes: dict[str, int], personal: bool
) -> tuple[list[str], Baseline, Callable[[], None]]:
    """Write who holds what; what there is to say of the rows, the score of always predicting the same, and what
    writes who holds what again.

    Args:
        folder: the stage's output folder.
        job: its job.
        ready: the examples that are here.
        data: their rows.
        sizes: client -> number of its examples; 0 of a site that is away, for which is taken what is known of it
            from an earlier call.
        personal: the clients keep parts of their own.
    """
    path, before = folder / "partition.json", examples_before(folder)
    sizes |= {name: before[name] for name, size in sizes.items() if not size and name in before}
    facts, lines = facts_and_lines(job, data, ready)
    whose, constant = baseline(job, ready, data.labels, personal)
    extra = {"data": facts, "baseline": {"what": whose, "score": constant} if constant else None}

    def write() -> None:
        held = {**holdings(job, ready, data, sizes), **extra}
        write_bytes(path, json.dumps(held, indent=1, ensure_ascii=False).encode())

    write()
    return lines, Baseline(whose, job.task.headline, constant), write


def examples_before(folder: Path) -> dict[str, int]:
    """Client -> its examples, as an earlier call wrote them down; without those of which it knew nothing."""
    before = read_partition(folder / "partition.json").get("clients", {})
    return {name: own["examples"] for name, own in before.items() if own["examples"]}


def note_greeted(engine: Engine, sizes: dict[str, int], write: Callable[[], None]) -> None:
    """Write down who has how many examples as sites come: what each has said first holds in later calls, too.

    Args:
        engine: of the stage.
        sizes: client -> number of its examples; brought up to date.
        write: writes who holds what, see :func:`facts_of`.
    """
    if not isinstance(engine, RemoteEngine):
        return
    told = engine.greeted

    def greeted(agreed: Mapping[str, int]) -> None:
        told(agreed)
        sizes.update(agreed)
        write()

    engine.greeted = greeted


def holdings(job: Job, ready: Ready, data: Prepared, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Who holds how many rows, examples and labels; of a site its examples alone are known.

    Args:
        job: the stage's job.
        ready: the examples that are here.
        data: their rows.
        sizes: client -> number of its examples.
    """
    clients: dict[str, Any] = {name: {"rows": None, "examples": n, "labels": None} for name, n in sizes.items()}
    shards = population(job.method.population, data.shards)
    for client, index in ready.shards.items():
        rows = shards[client]
        labels = None if data.by is None else dict(sorted(Counter(data.by[i] for i in rows).items()))
        clients[client] = {"rows": len(rows), "examples": len(index), "labels": labels}
    tests = {name: len(index) for own in ready.tests.values() for name, index in own.items()}
    test = sum(tests.values()) if tests else len(ready.test)
    return {"clients": clients, "test": test, "tests": tests, "left_out": data.dropped}
