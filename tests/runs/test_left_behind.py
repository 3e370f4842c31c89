"""Of changes that travel: of parts that are not sent any more it is said that what was left out never arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fedstrata
from fedstrata.events import StageStarted

Jobs = Callable[..., dict[str, Any]]
DELTA = {"wire": {"codec": "delta", "bits": 1}}


@pytest.mark.parametrize(
    ("name", "kind", "rounds", "tables", "parts"),
    [
        ("fedbfpt", "mlm", 4, DELTA, "layer.0"),
        ("fedbfpt", "mlm", 4, {}, ""),
        ("fedbt", "classify", 4, {**DELTA, "method": {"cycle": 2}}, ""),
        ("fedavg", "classify", 3, DELTA, ""),
    ],
)
def test_parts_that_are_left_behind_are_named(
    job: Jobs, name: str, kind: str, rounds: int, tables: dict[str, Any], parts: str
) -> None:
    made = job(name, kind, 4, **tables, train={"steps": 1})
    made["method"]["rounds"] = rounds
    told: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, StageStarted):
            told.extend(note.partition(":")[0] for note in event.notes if "never reaches the clients" in note)

    fedstrata.run(made, progress=listen)
    assert told == [parts] * bool(parts)
