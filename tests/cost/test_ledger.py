"""The ledger's entries and sums."""

from __future__ import annotations

import json

from fedstrata.cost.ledger import SETUP, Entry, totals

ENTRIES = [
    Entry(SETUP, "a", "setup", "down", "embeddings", 1_000_000),
    Entry(0, "a", "train", "down", "head", 10),
    Entry(0, "a", "train", "up", "head", 200),
    Entry(0, "b", "train", "up", "layer.0", 3_000),
    Entry(1, "b", "evaluate", "down", "head", 40_000),
]


def test_totals_keep_up_down_and_setup_apart() -> None:
    assert totals(entry.record() for entry in ENTRIES) == {"up": 3_200, "down": 40_010, "setup": 1_000_000}
    assert totals([]) == {"up": 0, "down": 0, "setup": 0}


def test_a_record_is_a_line_of_json() -> None:
    assert json.loads(json.dumps(ENTRIES[2].record())) == {
        "round": 0,
        "client": "a",
        "phase": "train",
        "direction": "up",
        "part": "head",
        "bytes": 200,
    }


def test_setup_stands_before_the_first_round() -> None:
    assert SETUP == -1
