"""Rounds and bytes to a target, by hand and from runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.cost.target import Reached, reached

Jobs = Callable[..., dict[str, Any]]

ROUNDS = [
    {"round": -1, "client": "server", "score": {"accuracy": 0.2, "loss": 3.0}},
    {"round": 0, "client": "a", "loss": 0.1},
    {"round": 0, "client": "server", "score": {"accuracy": 0.5, "loss": 1.0}},
    {"round": 1, "client": "server", "score": {"accuracy": 0.4, "loss": 2.0}},
    {"round": 2, "client": "server", "score": {"accuracy": 0.9, "loss": 0.5}},
]
LEDGER = [
    {"round": -1, "phase": "setup", "direction": "down", "bytes": 10_000},
    {"round": 0, "phase": "train", "direction": "up", "bytes": 1},
    {"round": 0, "phase": "evaluate", "direction": "down", "bytes": 20},
    {"round": 1, "phase": "train", "direction": "up", "bytes": 300},
    {"round": 2, "phase": "train", "direction": "down", "bytes": 4000},
]


@pytest.mark.parametrize(
    ("target", "metric", "expected"),
    [
        (0.2, "accuracy", Reached(0, {"up": 0, "down": 0})),
        (0.45, "accuracy", Reached(1, {"up": 1, "down": 20})),
        (0.51, "accuracy", Reached(3, {"up": 301, "down": 4020})),
        (0.91, "accuracy", None),
        (1.5, "loss", Reached(1, {"up": 1, "down": 20})),
        (0.4, "loss", None),
        (0.0, "f1", None),
    ],
)
def test_by_hand(target: float, metric: str, expected: Reached | None) -> None:
    assert reached(target, metric, ROUNDS, LEDGER) == expected


def test_a_run_tells_it(job: Jobs, tmp_path: Path) -> None:
    """The target is the score after the second of three rounds, so it is two rounds and their bytes."""
    whole = fedstrata.run(job("fedavg", method={"rounds": 3}))
    lines = [json.loads(line) for line in (whole.folder / "rounds.jsonl").read_text("utf-8").splitlines()]
    losses = [line["score"]["loss"] for line in lines if line["client"] == "server"]
    assert losses == sorted(losses, reverse=True)
    made = job("fedavg", method={"rounds": 3}, output={"dir": str(tmp_path / "told"), "target": losses[2]})
    told = fedstrata.run(made)
    first = [line for line in told.transfers if 0 <= line["round"] < 2]
    spent = {way: sum(line["bytes"] for line in first if line["direction"] == way) for way in ("up", "down")}
    assert told.target == {"score": losses[2], "rounds": 2, "bytes": spent}
    assert 0 < spent["up"] < told.bytes["up"]
    assert whole.target is None
    again = {**made, "output": {**made["output"], "dir": str(tmp_path / "never"), "target": 0.0}}
    assert fedstrata.run(again).target == {"score": 0.0, "rounds": None, "bytes": None}


def test_a_target_may_be_set_when_the_run_is_finished(job: Jobs) -> None:
    made = job("fedavg", method={"rounds": 2})
    assert fedstrata.run(made).target is None
    with_target = {**made, "output": {**made["output"], "target": 1e6}}
    told = fedstrata.run(with_target, resume=True)
    assert told.target is not None
    assert (told.target["score"], told.target["rounds"]) == (1e6, 0)
    (told.folder / "result.json").unlink()
    assert fedstrata.run(with_target, resume=True).target == told.target, "the end is as it was left"
    assert fedstrata.run(made, resume=True).target is None


def test_a_target_may_be_set_when_the_cells_are_done(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", method={"rounds": 2})
    made["sweep"] = {"seeds": [0, 1], "rows": [{"name": "a", "train.learning_rate": 0.01}, {"name": "b"}]}
    assert [entry.target for entry in fedstrata.sweep(made)] == [None, None]
    text = (tmp_path / "run" / "table.md").read_text("utf-8")
    assert "to target" not in text
    losses = {}
    for entry in fedstrata.sweep(made, {"output.target": 0.0}, resume=True):
        losses[entry.row] = entry.metrics["loss"]
        assert (entry.target, entry.reached, entry.rounds_to_target, entry.mb_to_target) == (0.0, 0, None, None)
    target = max(losses["a"])
    one, other = fedstrata.sweep(made, {"output.target": target}, resume=True)
    assert target < min(losses["b"])
    assert other.reached == 0
    assert one.reached == 2
    assert one.rounds_to_target in (1.5, 2.0)
    assert one.mb_to_target is not None
    assert one.up_mb is not None
    assert one.down_mb is not None
    assert one.up_mb / 2 <= one.mb_to_target <= one.up_mb + one.down_mb
    text = (tmp_path / "run" / "table.md").read_text("utf-8")
    assert "| rounds to target | MB to target |" in text
    assert "output.target" in text
    assert ">MB to target</th>" in fedstrata.report(tmp_path / "run").read_text("utf-8")
