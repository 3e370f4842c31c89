"""The keys that say what goes into a step: in a run, its forecast, its folder, and when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.errors import UserError
from fedstrata.job.file import load
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]
STEP = {"tokens_per_batch": 40, "gradient_accumulation": 2, "max_grad_norm": 0.5, "epochs": 2, "lr_decay": 0.5}


def budgeted(job: Jobs, name: str = "fedavg", kind: str = "classify", **tables: Any) -> dict[str, Any]:
    made = job(name, kind, 4, **{**tables, "train": {**STEP, **tables.get("train", {})}})
    del made["train"]["batch_size"]
    return made


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("fedavg", {}),
        ("fedavg", {"train": {"padding": "max", "steps": 1, "group_by_length": False}}),
        ("fedbt", {"wire": {"dtype": "int8"}, "clients": {"fraction": 0.67}}),
        ("fedfreezebert", {"head": {"kind": "psum"}, "train": {"feature_cache_gb": 2e-5}}),
        ("centralized", {}),
    ],
)
def test_the_forecast_is_the_record(job: Jobs, name: str, tables: dict[str, Any]) -> None:
    made = budgeted(job, name, **tables)
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    everyone = forecast["clients"]
    assert everyone["train_flops"] == result.flops > 0
    assert {way: everyone[f"{way}_bytes"] for way in ("up", "down", "setup")} == result.bytes


def test_a_run_goes_on_to_the_same_bits_and_with_the_same_steps_alone(job: Jobs, tmp_path: Path) -> None:
    whole = fedstrata.run(budgeted(job), {"output.dir": str(tmp_path / "whole")})
    made, folder = budgeted(job), {"output.dir": str(tmp_path / "parts")}
    fedstrata.run(made, {**folder, "method.rounds": 1, "output.keep_state": True})
    for key, value in (("tokens_per_batch", 41), ("gradient_accumulation", 1), ("max_grad_norm", 0.6)):
        with pytest.raises(UserError, match=f"train.{key} = "):
            fedstrata.run(made, {**folder, f"train.{key}": value}, resume=True)
    fedstrata.run(made, folder, resume=True)
    assert whole.score == json.loads((tmp_path / "parts" / "result.json").read_text())["score"]
    one, other = (saved_models(tmp_path / name) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())


def test_the_job_of_a_runs_folder_can_be_run(job: Jobs, tmp_path: Path) -> None:
    """It names the budget and no size that would contradict it."""
    fedstrata.run(budgeted(job))
    text = (tmp_path / "run" / "job.toml").read_text()
    assert "tokens_per_batch = 40" in text
    assert "batch_size" not in text
    [made] = load(budgeted(job))
    assert made.train.model_validate(made.train.model_dump()) == made.train


@pytest.mark.parametrize(
    ("name", "tables", "why"),
    [
        ("fedbert", {"train": {"gradient_accumulation": 2}}, r"gradient_accumulation: .* step with every batch"),
        ("fedbert", {"train": {"max_grad_norm": 1.0}}, r"max_grad_norm: .* step with every batch"),
        ("fedavg", {"train": {"tokens_per_batch": 9}}, "found both batch_size and tokens_per_batch"),
    ],
)
def test_where_a_key_does_not_fit_a_sentence_says_so(
    job: Jobs, name: str, tables: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        load(job(name, "classify", **tables))


def test_a_budget_goes_with_methods_that_send_weights(job: Jobs) -> None:
    for name, method in (("fedbert", {}), ("fedfreezebert", {"variant": "centralized"})):
        made = job(name, "classify", 4, method=method, train={"tokens_per_batch": 9})
        del made["train"]["batch_size"]
        with pytest.raises(UserError, match="tokens_per_batch: goes with methods that send weights"):
            load(made)
