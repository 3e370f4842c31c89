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
    schedule = {"lr_schedule": "polynomial", "warmup_ratio": 0.4}
    config = job("fedavg", "classify", 1, clients={**FIVE, "fraction": 0.6}, method={"rounds": 3}, train=schedule)
    plain = fedstrata.run(made(config, tmp_path / "plain"))
    buffered = fedstrata.run(made(config, tmp_path / "buffered", buffer=3))
    same(plain, buffered)
    assert all(line["asked"] == line["round"] for line in lines(buffered, "arrivals"))
    other = fedstrata.run(made(config, tmp_path / "other", buffer=2))
    assert other.bytes != plain.bytes


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "classify", {"train": {"optimizer_state": "persist"}, "server": {"max_norm": 0.5}}),
    ("fedbt", "mlm", {"wire": {"codec": "delta", "bits": 4}}),
    (
        "fedadam",
        "classify",
        {"wire": {"dtype": "int8"}, "adapter": {"kind": "lora", "rank": 2}, "clients": {**FIVE, "fraction": 0.8}},
    ),
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
    assert costs["asynchronous"] == "exact"
    late = [line["staleness"] for line in trained if line["staleness"]]
    said = f"The rounds were asynchronous: {len(late)} of 12 answers came late, by"
    assert said in fedstrata.report(whole.folder).read_text("utf-8")
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


def test_a_killed_replay_sends_a_missing_client_nothing_that_it_holds(job: Jobs, tmp_path: Path) -> None:
    """Layer 0 rests in the last round: a site may have lost it with its disk, a client in one process has not."""
    config = job("fedbfpt", "mlm", clients={"count": 2}, method={"rounds": 4}, engine={"buffer": 2, "quorum": 0.5})
    recorded = [(at, name) for at in range(4) for name in ("client-0", "client-1")]
    (tmp_path / "order.jsonl").write_text(
        "".join(
            json.dumps({"round": at, "client": name, "asked": at, "missing": (at, name) == (3, "client-1")}) + "\n"
            for at, name in recorded
        )
    )
    order = str(tmp_path / "order.jsonl")

    def dies(event: Any) -> None:
        if type(event).__name__ == "Missed":
            raise KeyboardInterrupt

    whole = fedstrata.run(made(config, tmp_path / "whole", arrivals=order))
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made(config, tmp_path / "killed", arrivals=order), progress=dies)
    same(whole, fedstrata.run(made(config, tmp_path / "killed", arrivals=order), resume=True))


def test_a_damaged_version_costs_a_round_and_no_bit(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job("fedavg", "classify", 1, clients=FIVE, method={"rounds": 5}, engine={"buffer": 2})
    whole = fedstrata.run(made(config, tmp_path / "whole"))
    commit = stages.state.RunState.commit

    def dies(*args: Any) -> None:
        if args[3] == 5:
            raise RuntimeError("killed")
        commit(*args)

    monkeypatch.setattr(stages.state.RunState, "commit", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(made(config, tmp_path / "killed"))
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    manifests = sorted((tmp_path / "killed" / "state").glob("manifest-*.json"))
    before, newest = (json.loads(path.read_text("utf-8"))["late"]["files"] for path in manifests)
    [file, *_] = [file for file in newest if file not in before]
    (tmp_path / "killed" / "state" / "asked" / f"{file[0]}@{file[1]}.safetensors").unlink()
    told: list[Any] = []
    same(whole, fedstrata.run(made(config, tmp_path / "killed"), resume=True, progress=told.append))
    assert any(
        "is damaged or missing; the run goes on from its state after round 3" in str(event) for event in told
    )


def test_what_a_run_between_sites_costs_at_most(job: Jobs, tmp_path: Path) -> None:
    """Whoever answers when: late answers move parts in rounds in which a plain run leaves them alone."""
    tables = {"clients": {**FIVE, "fraction": 0.8}, "wire": {"codec": "delta", "bits": 4}}
    config = job("fedbt", "classify", 3, method={"rounds": 9, "cycle": 3}, **tables)
    between = {"name": "flower", "federation": "nowhere", "buffer": 2}
    costs = fedstrata.forecast({**config, "engine": between})["fedbt"]
    assert costs["asynchronous"] == "bound"
    for buffer in (1, 2, 3, 5):
        exact = fedstrata.forecast(made(config, tmp_path, buffer=buffer))["fedbt"]["clients"]
        for kind in ("up_bytes", "down_bytes", "train_flops", "setup_bytes"):
            assert exact[kind] <= costs["clients"][kind]
    plain = fedstrata.forecast({**config, "engine": {"name": "inprocess"}})["fedbt"]
    assert plain["clients"]["up_bytes"] == costs["clients"]["up_bytes"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"privacy": {"sum_only": True}}, r"\[privacy\] sum_only, whose sums are opened"),
    (
        "fedavg",
        {"privacy": {"level": "client", "epsilon": 8.0, "single_message": True}, "task": {"labels": ["a", "b"]}},
        r"\[privacy\] level = 'client', whose epsilon counts",
    ),
    (
        "fedavg",
        {"server": {"aggregate": "median"}},
        r"\[server\] aggregate = 'median', which compares",
    ),
    ("fedavg", {"wire": {"part_period": 2}}, r"\[wire\] part_period, where every part"),
    ("fedavg", {"adapter": {"kind": "lora", "merge": "exact"}}, r"\[adapter\] merge = 'exact', which averages"),
    (
        "fedavg",
        {"clients": {**FIVE, "test": 0.5}, "data": {"test": None}},
        r"\[clients\] test, by which every",
    ),
    ("fedsplitbert", {}, "'fedsplitbert' as set here, whose clients keep parts of their own"),
    (
        "fedbert",
        {"client": {"may_send": ["activations"]}},
        "not with 'fedbert' as set here, which sends",
    ),
    ("centralized", {}, "goes with methods whose clients send parts of the model, not with 'centralized'"),
    (
        "fedavg",
        {"engine": {"arrivals": "nowhere.jsonl", "buffer": 2}},
        r"\[engine\] arrivals: there is no file",
    ),
    (
        "fedavg",
        {"engine": {"arrivals": "nowhere.jsonl"}},
        r"arrivals: goes with asynchronous rounds; expected",
    ),
    ("fedavg", {"engine": {"buffer": 0}}, r"\[engine\] buffer: must be 1 or more, found 0"),
    ("fedavg", {"engine": {"buffer": 2.5}}, r"\[engine\] buffer: must be a whole number, found 2.5"),
]


@pytest.mark.parametrize(("name", "tables", "complaint"), REFUSED)
def test_what_asynchronous_rounds_do_not_go_with(
    job: Jobs, name: str, tables: dict[str, Any], complaint: str
) -> None:
    config = job(name, "classify", 2, **{"clients": FIVE, "engine": {"buffer": 2}, **tables})
    with pytest.raises(UserError, match=complaint):
        fedstrata.forecast(config)


def test_a_run_goes_on_in_the_order_in_which_it_began(job: Jobs, tmp_path: Path) -> None:
    """Also with more rounds: what was out when it ended is part of its state."""
    config = job("fedavg", "classify", 1, clients=FIVE, engine={"buffer": 2})
    other = fedstrata.run({**made(config, tmp_path / "other"), "train": {**config["train"], "seed": 1}})
    long = {**config, "method": {"name": "fedavg", "rounds": 4}}
    whole = fedstrata.run(made(long, tmp_path / "whole"))
    kept = {"dir": str(tmp_path / "kept"), "keep_state": True}
    fedstrata.run({**made(config, tmp_path), "output": kept})
    order = str(other.folder / "arrivals.jsonl")
    more = {**made(config, tmp_path, arrivals=order), "method": {"name": "fedavg", "rounds": 3}, "output": kept}
    with pytest.raises(UserError, match=r"has the arrivals of 2 rounds, the job has 3"):
        fedstrata.run(more, resume=True)
    with (other.folder / "arrivals.jsonl").open("a") as file:
        file.write((whole.folder / "arrivals.jsonl").read_text("utf-8"))
    with pytest.raises(UserError, match=r"\[engine\] arrivals: "):
        fedstrata.run(more, resume=True)
    same(whole, fedstrata.run({**made(long, tmp_path), "output": kept}, resume=True))
