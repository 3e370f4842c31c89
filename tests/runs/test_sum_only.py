"""Runs with ``[privacy] sum_only``: the mean to half a step, the same bits on every engine, bytes as forecast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata import UserError
from fedstrata.exchanges import sums
from fedstrata.privacy.fixed_point import STEP
from fedstrata.privacy.opening import Opening
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]
SUMS = {"privacy": {"sum_only": True}}


def test_one_round_is_the_mean_to_half_a_step(job: Jobs, tmp_path: Path) -> None:
    config = job("fedavg", "classify", 2, clients={"count": 4}, method={"rounds": 1})
    one = fedstrata.run({**config, "output": {"dir": str(tmp_path / "a")}})
    other = fedstrata.run({**config, **SUMS, "output": {"dir": str(tmp_path / "b")}})
    first, second = saved_models(one.folder), saved_models(other.folder)
    for name, tensor in first.items():
        ulp = torch.nextafter(tensor.abs(), torch.tensor(float("inf"))) - tensor.abs()
        assert ((tensor - second[name]).abs() <= STEP / 2 + 2 * ulp).all(), name
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_what_is_opened_is_the_sum_of_the_clients_own_integers(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Python's integers, taken at the clients before the masks; the server has not seen one of them."""
    from fedstrata.privacy.masked_sums import Member

    own: list[tuple[int, list[int]]] = []
    seen: list[list[int]] = []
    masked, result = Member.masked, Opening.result

    def noted(self: Any, question: Any, numbers: Any) -> Any:
        own.append((self.secrets.weight, numbers[0].tolist()))
        return masked(self, question, numbers)

    def opened(self: Any) -> Any:
        made = result(self)
        seen.append(self.roster.fixed.signed(made[0][0]).tolist())
        return made

    monkeypatch.setattr(Member, "masked", noted)
    monkeypatch.setattr(Opening, "result", opened)
    config = job("fedavg", "classify", 1, clients={"count": 3}, method={"rounds": 1}, **SUMS)
    fedstrata.run({**config, "output": {"dir": str(tmp_path / "a")}})
    [total] = seen
    assert total == [sum(weight * values[i] for weight, values in own) for i in range(len(total))]
    assert len({weight for weight, _ in own}) >= 1


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "classify", {}),
    ("fedprox", "classify", {"train": {"proximal_mu": 0.5}, "wire": {"dtype": "bf16"}}),
    ("fedbfpt", "mlm", {}),
    ("fedavg", "classify", {"adapter": {"kind": "lora", "rank": {"default": 8, "client-0": 4}}}),
    ("fedbt", "mlm", {}),
    ("fedsplitbert", "classify", {"clients": {"test": 0.3, "count": 3}}),
    ("fedfreezebert", "classify", {"head": {"kind": "cls"}}),
    ("fedadam", "classify", {"clients": {"fraction": 0.6, "count": 6}}),
]


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_bytes_are_as_forecast(job: Jobs, tmp_path: Path, name: str, kind: str, tables: dict[str, Any]) -> None:
    tables = {**tables, "clients": {"count": 4, **tables.get("clients", {})}}
    config = job(name, kind, 3, **tables, **SUMS)
    config["method"]["rounds"] = 2
    if "test" in config["clients"]:
        del config["data"]["test"]
    [costs] = fedstrata.forecast(config).values()
    run = fedstrata.run({**config, "output": {"dir": str(tmp_path / "run")}})
    assert run.bytes["up"] == costs["clients"]["up_bytes"]
    assert run.bytes["down"] == costs["clients"]["down_bytes"]
    assert costs["sums"]["protocol_bytes"] > 0
    assert costs["sums"]["half_step"] == STEP / 2


def test_the_pool_comes_to_the_same_bits(job: Jobs, tmp_path: Path) -> None:
    config = job("fedavg", "classify", 1, clients={"count": 4}, method={"rounds": 2}, **SUMS)
    runs = [
        fedstrata.run({**config, "engine": engine, "output": {"dir": str(tmp_path / str(i))}})
        for i, engine in enumerate(({"name": "inprocess"}, {"name": "pool", "workers": 2}))
    ]
    first, second = (saved_models(run.folder) for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert runs[0].bytes == runs[1].bytes


def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job("fedavg", "classify", 1, clients={"count": 3}, method={"rounds": 3}, **SUMS)
    whole = fedstrata.run({**config, "output": {"dir": str(tmp_path / "whole")}})
    broken = {**config, "output": {"dir": str(tmp_path / "broken")}}
    opened, calls = sums.SummedHalf.open, []

    def dies(self: Any, loop: Any, round: int, opening: Any) -> None:
        calls.append(round)
        opened(self, loop, round, opening)
        if len(calls) == 2:
            raise RuntimeError("killed")

    monkeypatch.setattr(sums.SummedHalf, "open", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(broken)
    run = fedstrata.run(broken, resume=True)
    assert calls == [0, 1, 1, 2]
    first, second = saved_models(whole.folder), saved_models(run.folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (whole.folder / "ledger.jsonl").read_text() == (run.folder / "ledger.jsonl").read_text()


def test_a_loss_stays_with_its_client(job: Jobs, tmp_path: Path) -> None:
    import json

    config = job("fedavg", "classify", 1, clients={"count": 3}, method={"rounds": 1}, **SUMS)
    run = fedstrata.run({**config, "output": {"dir": str(tmp_path / "run")}})
    lines = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["client"] != "server"] == [None] * 3
    assert fedstrata.report(run.folder).exists()


def test_a_change_that_is_too_large_is_refused(job: Jobs, tmp_path: Path) -> None:
    config = job("fedavg", "classify", 1, clients={"count": 3}, method={"rounds": 1}, **SUMS)
    config["train"] = {**config["train"], "optimizer": "sgd", "learning_rate": 1e8}
    with pytest.raises(UserError, match=r"round 1, client .*(largest number that a masked sum takes|diverged)"):
        fedstrata.run({**config, "output": {"dir": str(tmp_path / "run")}})


REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("fedbert", "classify", {}, r"'fedbert' as set here sends activations"),
    (
        "fedfreezebert",
        "classify",
        {
            "method": {"variant": "centralized"},
            "head": {"kind": "cls"},
            "client": {"may_send": ["hidden_states"]},
        },
        r"sends hidden_states",
    ),
    ("centralized", "classify", {}, r"one client holds all that is trained on"),
    ("local", "classify", {}, r"nobody sends anything that could be summed"),
    ("fedavg", "classify", {"clients": {"count": 2}}, r"only client-0 and client-1 would send embeddings"),
    ("fedavg", "classify", {"clients": {"fraction": 0.3}}, r"would send embeddings, and a sum of fewer than 3"),
    (
        "fedavg",
        "classify",
        {"server": {"aggregate": "median"}},
        r"\[server\] aggregate = 'median' compares single",
    ),
    ("fedavg", "classify", {"server": {"max_norm": 1.0}}, r"\[server\] max_norm shortens single messages"),
    ("fedavg", "classify", {"wire": {"dtype": "int8"}}, r"'int8' has a scale for every row"),
    ("fedavg", "classify", {"wire": {"codec": "delta"}}, r"\[wire\] codec = 'delta' has scales and places"),
    (
        "fedavg",
        "classify",
        {"adapter": {"kind": "lora", "merge": "exact"}},
        r"merge = 'exact' takes the product of each client's own factors",
    ),
    (
        "fedavg",
        "classify",
        {"adapter": {"kind": "lora", "rank": {"default": 4, "client-2": 8}}},
        r"in round 1 only client-2 would send .*, and a sum of fewer than 3 clients is not opened",
    ),
]


@pytest.mark.parametrize(("name", "kind", "tables", "reason"), REFUSALS)
def test_what_needs_single_messages_is_refused_before_anything_runs(
    job: Jobs, tmp_path: Path, name: str, kind: str, tables: dict[str, Any], reason: str
) -> None:
    tables = {**tables, "clients": {"count": 4, **tables.get("clients", {})}}
    config = {**job(name, kind, 3, **tables, **SUMS), "output": {"dir": str(tmp_path / "run")}}
    for refused in (fedstrata.run, fedstrata.forecast):
        with pytest.raises(UserError, match=reason) as error:
            refused(config)
        assert "[privacy] sum_only" in str(error.value)


def test_own_aggregates_and_codecs_are_refused(job: Jobs, tmp_path: Path) -> None:
    from fedstrata.server.aggregate import WeightedMean
    from fedstrata.wire.codec import StateCodec

    config = {**job("fedavg", "classify", 1, **SUMS), "output": {"dir": str(tmp_path / "run")}}
    with pytest.raises(UserError, match="the run's own aggregate works on single messages"):
        fedstrata.run(config, aggregate=WeightedMean)
    with pytest.raises(UserError, match="the run's own codec makes messages that are no integers"):
        fedstrata.run(config, codec=StateCodec("fp32"))
