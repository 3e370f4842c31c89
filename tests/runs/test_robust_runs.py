"""Robust aggregates in whole runs: the same bits on every engine and after a kill, the bytes of the forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata import UserError
from tiny import saved_tensors

Jobs = Callable[..., dict[str, Any]]
FIVE = {"count": 5, "min_examples": 2}


def tensors(run: Any) -> dict[str, torch.Tensor]:
    return saved_tensors(run.model_folder)


def same(one: Any, other: Any) -> None:
    first, second = tensors(one), tensors(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (one.score, one.bytes) == (other.score, other.bytes)


def test_the_same_bits_on_every_engine_and_after_a_kill(job: Jobs, tmp_path: Any) -> None:
    server = {"aggregate": "centered_clip", "max_norm": 0.5}
    config = job("fedavg", "classify", clients=FIVE, server=server, engine={"threads": 1})

    def to(folder: str, **engine: Any) -> dict[str, Any]:
        return {**config, "output": {"dir": str(tmp_path / folder)}, "engine": {**config["engine"], **engine}}

    whole = fedstrata.run(to("one", name="inprocess"))
    same(whole, fedstrata.run(to("two", name="pool", workers=2)))

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and (event.round, event.client) == (1, "client-3"):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(to("three", name="inprocess"), progress=dying)
    same(whole, fedstrata.run(to("three", name="inprocess"), resume=True))
    mean = fedstrata.run({**to("mean", name="inprocess"), "server": {}})
    assert not torch.equal(tensors(mean)["classifier.weight"], tensors(whole)["classifier.weight"])


@pytest.mark.parametrize(
    ("name", "kind", "tables"),
    [
        ("fedbfpt", "mlm", {}),
        ("fedbt", "classify", {"wire": {"codec": "delta", "bits": 4}}),
        (
            "fedsplitbert",
            "classify",
            {"clients": {**FIVE, "test": 0.5}, "data": {"test": None}},
        ),
        ("fedadam", "classify", {"wire": {"dtype": "fp16"}}),
    ],
)
def test_the_bytes_are_those_of_the_forecast(job: Jobs, name: str, kind: str, tables: dict[str, Any]) -> None:
    made = {"clients": FIVE, "server": {"aggregate": "trimmed_mean", "max_norm": 1.0}, **tables}
    config = job(name, kind, **made)
    config["data"] = {key: value for key, value in config["data"].items() if value is not None}
    costs = fedstrata.forecast(config)[name]["clients"]
    run = fedstrata.run(config)
    assert (run.bytes["up"], run.bytes["down"]) == (costs["up_bytes"], costs["down_bytes"])


@pytest.mark.parametrize(
    ("name", "tables", "sentence"),
    [
        (
            "fedavg",
            {"clients": {"count": 2}, "server": {"aggregate": "median"}},
            "'median' needs 3 clients that send",
        ),
        (
            "fedavg",
            {"clients": {"count": 6}, "server": {"aggregate": "krum", "malicious": 2}},
            "'krum' with malicious = 2 needs 7 clients that send a part, but embeddings is sent by 6 clients",
        ),
        (
            "fedbfpt",
            {
                "clients": {"count": 3},
                "method": {"variant": "all", "local_layers": {"default": 2, "client-1": 3}},
                "server": {"aggregate": "median"},
            },
            "'median' needs 3 clients that send a part, but layer.2 is sent by 1 client in round 1",
        ),
        ("fedbert", {"server": {"aggregate": "median"}}, "goes with methods whose clients send weights, not with"),
        ("centralized", {"server": {"aggregate": "median"}}, "with 'centralized' one client at a time trains"),
        ("local", {"server": {"max_norm": 1.0}}, None),
        ("fedavg", {"server": {"malicious": 1}}, "malicious: goes with aggregate = 'trimmed_mean' or 'krum' or"),
        ("fedavg", {"server": {"aggregate": "median", "clip_radius": 1.0}}, "clip_radius: goes with aggregate ="),
        ("fedavg", {"server": {"aggregate": "krumm"}}, "did you mean 'krum'"),
        (
            "fedavg",
            {"adapter": {"kind": "lora", "merge": "exact"}, "server": {"max_norm": 1.0}},
            "does not go with [adapter] merge = 'exact'",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    job: Jobs, name: str, tables: dict[str, Any], sentence: str | None
) -> None:
    config = job(name, "mlm" if name == "fedbfpt" else "classify", **tables)
    for call in (fedstrata.run, fedstrata.forecast):
        if sentence is None:
            call(config)
            continue
        with pytest.raises(UserError) as refused:
            call(config)
        assert sentence in str(refused.value)
