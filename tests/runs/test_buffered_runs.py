"""Asynchronous rounds in whole runs: late answers, the forecast, kills, recorded arrivals, what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata import UserError
from fedstrata.runs import stages
from tiny import saved_tensors

Jobs = Callable[..., dict[str, Any]]
FIVE = {"count": 5, "min_examples": 2}


def lines(run: Any, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / f"{name}.jsonl").read_text("utf-8").splitlines()]


def same(one: Any, other: Any) -> None:
    first, second = saved_tensors(one.model_folder), saved_tensors(other.model_folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (one.score, one.bytes, one.flops) == (other.score, other.bytes, other.flops)
    ledgers = [sorted(lines(run, "ledger"), key=str) for run in (one, other)]
    assert ledgers[0] == ledgers[1]


def made(config: dict[str, Any], folder: Path, **engine: Any) -> dict[str, Any]:
    """The job in another folder, on another engine."""
    table = {"name": "inprocess", "threads": 1, **config.get("engine", {}), **engine}
    return {**config, "engine": table, "output": {"dir": str(folder)}}


def test_a_round_that_waits_for_all_is_a_plain_round(job: Jobs, tmp_path: Path) -> None:
    config = job("fedavg", "classify", 1, clients={**FIVE, "fraction": 0.6}, method={"rounds": 3})
    plain = fedstrata.run(made(config, tmp_path / "plain"))
    buffered = fedstrata.run(made(config, tmp_path / "buffered", buffer=3))
    same(plain, buffered)
    assert {(line["asked"] - line["round"], line["missing"]) for line in lines(buffered, "arrivals")} == {(0, False)}
    other = fedstrata.run(made(config, tmp_path / "other", buffer=2))
    assert other.bytes != plain.bytes


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "classify", {"train": {"optimizer_state": "persist"}, "server": {"max_norm": 0.5}}),
    ("fedbt", "mlm", {"wire": {"codec": "delta", "bits": 4}}),
    ("fedadam", "classify", {"wire": {"dtype": "fp16"}, "clients": {**FIVE, "fraction": 0.8}}),
    ("fedavg", "classify", {"wire": {"dtype": "int8"}, "adapter": {"kind": "lora", "rank": 2}}),
]


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_forecast_kills_workers_and_a_replay_change_nothing(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, tables: dict[str, Any]
) -> None:
    tables = {"clients": FIVE, "method": {"rounds": 6}, "engine": {"buffer": 2}, **tables}
    config = job(name, kind, 2, **tables)
    config["method"]["rounds"] = 6
    whole = fedstrata.run(made(config, tmp_path / "whole"))
    trained = [line for line in lines(whole, "rounds") if line["client"] != "server"]
    assert max(line["staleness"] for line in trained) > 1
    assert len(trained) == 2 * 6
    [costs] = fedstrata.forecast(made(config, tmp_path / "none")).values()
    assert {way: costs["clients"][f"{way}_bytes"] for way in ("up", "down")} == {
        way: whole.bytes[way] for way in ("up", "down")
    }
    recorded = str(whole.folder / "arrivals.jsonl")
    same(whole, fedstrata.run(made(config, tmp_path / "replayed", arrivals=recorded)))

    commit = stages.state.RunState.commit
    for killed in range(1, 6):

        def dies(*args: Any, at: int = killed) -> None:
            if args[3] == at:
                raise RuntimeError("killed")
            commit(*args)  # the state, the server, what changed, rounds done

        monkeypatch.setattr(stages.state.RunState, "commit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            fedstrata.run(made(config, tmp_path / "killed"), resume=True)
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    resumed = fedstrata.run(made(config, tmp_path / "killed"), resume=True)
    same(whole, resumed)
    assert lines(whole, "arrivals") == lines(resumed, "arrivals")
    assert not list((resumed.folder / "state").rglob("asked/*"))
    assert not list((resumed.folder / "state").rglob("late/*"))
