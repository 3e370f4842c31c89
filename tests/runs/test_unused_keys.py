"""Keys that change nothing are named before a run: those, and no others, as runs with and without them show."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.events import StageStarted
from fedstrata.forecasts.validate import validate
from fedstrata.job.file import load
from fedstrata.job.unused_keys import unused_keys
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.methods.fedbt import FedBT
from fedstrata.methods.fedsplitbert import FedSplitBERT
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method
from fedstrata.plan.streams import Streams
from fedstrata.plan.unused_options import unused_options
from fedstrata.server.mean import WeightedMean
from fedstrata.server.optimizer import AdaptiveOptimizer
from fedstrata.wire.codec import StateCodec
from tiny import tiny_model

Job = Callable[..., dict[str, Any]]
SPLIT = {"client.may_send": ["weights", "hidden_states", "activations"]}
BASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "centralized": {},
    "local": {},
    "fedfreezebert": {"task.kind": "classify"},
    "fedfreezebert centralized": {"task.kind": "classify", "method.variant": "centralized", **SPLIT},
    "fedbert": SPLIT,
}
VALUES: dict[str, Any] = {
    "wire.dtype": "fp16",
    "wire.codec": "delta",
    "wire.activations": "int8",
    "server.optimizer": "adam",
    "server.beta2": 0.5,
    "train.proximal_mu": 0.5,
    "train.lr_decay": 0.5,
    "train.mlm_head": "full",
    "clients.fraction": 0.4,
    "clients.alpha": 0.3,
    "data.holdout": 0.5,
}


def played(job: dict[str, Any], changes: dict[str, Any], folder: Path, **own: Any) -> tuple[str, list[str]]:
    """What a run sent and saved, as one digest, and which keys it said have no effect."""
    said: list[str] = []

    def hear(event: Any) -> None:
        if isinstance(event, StageStarted):
            said.extend(note.partition(":")[0] for note in event.notes if "no effect here" in note)

    fedstrata.run(job, {**changes, "output.dir": str(folder)}, progress=hear, **own)
    found = hashlib.sha256((folder / "ledger.jsonl").read_bytes())
    for path in sorted(folder.rglob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest(), said


@pytest.mark.parametrize("base", BASES)
def test_a_key_is_named_if_and_only_if_it_changes_nothing(base: str, job: Job, tmp_path: Path) -> None:
    source, over = job(base.split()[0], "mlm", 4), BASES[base]
    without, said = played(source, over, tmp_path / "base")
    assert not said
    for key, value in VALUES.items():
        table, _, name = key.partition(".")
        found, said = played(source, {**over, key: value}, tmp_path / key)
        assert ([f"[{table}] {name}"] == said) == (found == without), f"{key} = {value}: said {said}"


@pytest.mark.parametrize(
    ("name", "own", "replaced", "acts"),
    [
        ("codec", StateCodec("bf16"), {"wire.dtype": "fp16"}, {}),
        ("codec", StateCodec("bf16"), {"wire.codec": "delta", "wire.up_bits": 1}, {}),
        ("aggregate", WeightedMean, {"server.aggregate": "centered_clip", "server.clip_radius": 1.0}, {}),
        ("aggregate", WeightedMean, {}, {"server.optimizer": "adam", "server.momentum": 0.5}),
        ("server_optimizer", AdaptiveOptimizer(), {"server.optimizer": "adagrad", "server.momentum": 0.5}, {}),
        ("server_optimizer", AdaptiveOptimizer(), {}, {"server.aggregate": "median"}),
    ],
)
def test_keys_in_whose_place_an_object_of_the_callers_stands_are_named(
    name: str, own: Any, replaced: dict[str, Any], acts: dict[str, Any], job: Job, tmp_path: Path
) -> None:
    """Both what they do and what is said of them is as if they were not set."""
    source = job("fedavg", "classify", clients={"count": 3})
    without, said = played(source, {}, tmp_path / "base", **{name: own})
    assert not said
    found, said = played(source, {**replaced, **acts}, tmp_path / "keys", **{name: own})
    assert (found == without) == (not acts)
    keys = ", ".join(key.partition(".")[2] for key in replaced)
    assert said == ([f"[{next(iter(replaced)).partition('.')[0]}] {keys}"] if replaced else [])


def test_of_split_learning_a_codec_for_parts_leaves_the_type_of_hidden_states(job: Job) -> None:
    (made,) = load(job("fedbert", "mlm", wire={"dtype": "fp16", "codec": "delta"}))
    plans = [made.method.plan(find_parts(tiny_model()), "mlm", 0, "client-0", Streams(0))]
    assert [line.partition(":")[0] for line in unused_keys(made, plans, ["codec"])] == ["[wire] codec"]


def test_keys_that_are_told_without_a_run(job: Job) -> None:
    def said(**tables: dict[str, Any]) -> list[str]:
        (made,) = load(job("fedavg", "classify", **tables))
        parts = find_parts(tiny_model(head="classify"))
        plans = [made.method.plan(parts, "classify", 0, "client-0", Streams(0))]
        return [line.partition(":")[0] for line in unused_keys(made, plans)]

    assert said(train={"optimizer": "sgd", "betas": [0.5, 0.9], "epsilon": 1e-6}) == ["[train] betas, epsilon"]
    assert said(train={"lr_power": 2.0}) == ["[train] lr_power"]
    assert not said(train={"lr_power": 2.0, "lr_schedule": "polynomial"})
    assert not said(train={"lr_decay": 0.5, "epochs": 2})
    assert said(server={"optimizer": "adagrad", "momentum": 0.5, "tau": 0.1}) == ["[server] momentum"]
    delta = {"codec": "delta", "up_bits": 1, "down_bits": 4}
    assert said(wire={**delta, "bits": 2}) == ["[wire] bits"]
    assert not said(wire=delta)
    assert not said(wire={"codec": "delta", "up_bits": 1, "bits": 2})
    assert said(head={"kind": "cls", "classifier": "shared"}) == ["[head] classifier"]
    assert not said(head={"kind": "psum", "classifier": "shared"})
    assert said(head={"kind": "psum", "tokens": "inner"}) == ["[head] tokens"]
    assert said(output={"client_models": True}) == ["[output] client_models"]
    assert said(engine={"quorum": 1.0}) == ["[engine] quorum"]
    assert said(train={"feature_cache_gb": 1.0}) == ["[train] feature_cache_gb"]
    assert not said(train={"feature_cache_gb": 1.0, "cache_frozen_layers": True, "epochs": 2})
    assert said(adapter={"kind": "lora", "dropout": 0.5}, train={"dropout": False}) == ["[adapter] dropout"]
    assert not said(adapter={"kind": "lora", "dropout": 0.5})


@pytest.mark.parametrize(
    ("name", "adapter", "told"),
    [
        ("fedfreezebert", {}, "no adapter is ever trained with 'fedfreezebert' as set here"),
        ("none", {"merge": "freeze_a"}, "no adapter is ever trained with 'none' as set here"),
        ("fedbt", {"targets": ["word_embeddings"]}, "no adapter is ever trained with 'fedbt' as set here"),
        ("fedbt", {"targets": ["query", "word_embeddings"]}, "adapters of embeddings are never trained"),
        ("fedbt", {"targets": ["query"]}, ""),
        ("fedavg", {"targets": ["query", "word_embeddings"]}, ""),
        ("fedbert", {}, ""),  # the server trains them
    ],
)
def test_adapters_that_are_never_trained_are_told(job: Job, name: str, adapter: dict[str, Any], told: str) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    made = job(name, "classify", 4, adapter={"kind": "lora", "rank": 2, **adapter}, method={"rounds": 1})
    found = [line for line in validate(made).lines if line.startswith("note    [adapter]")]
    assert len(found) == bool(told), found
    assert told in "".join(found)


@pytest.mark.parametrize(
    ("method", "task", "unused"),
    [
        (FedBFPT(local_layers=3), "mlm", ()),
        (FedBFPT(local_layers=2), "mlm", ()),  # what half of the model is
        (FedBFPT(local_layers={"default": 3, "client-9": 1}), "mlm", ()),
        (FedBFPT(variant="all", layers_per_round=2), "mlm", ("layers_per_round",)),
        (FedBFPT(variant="m", replacement=False, shared_draw=True), "mlm", ("replacement", "shared_draw")),
        (FedBFPT(local_layers=3, replacement=False), "mlm", ()),
        (FedBFPT(shared_draw=True), "mlm", ()),
        (FedBT(cycle=3, pooler="train"), "mlm", ("cycle", "pooler")),
        (FedBT(cycle=3, pooler="train"), "classify", ()),
        (FedBT(variant="half", cycle=3), "classify", ("cycle",)),
        (FedSplitBERT(critical_layer=2, embeddings="local"), "mlm", ()),
    ],
    ids=repr,
)
def test_options_that_no_plan_depends_on(method: Method, task: str, unused: tuple[str, ...]) -> None:
    parts: Parts = find_parts(tiny_model(head=task, layers=4))
    assert unused_options(method, parts, task, ["client-0", "client-1"], Streams(0)) == unused


def test_an_option_is_named_before_the_run(job: Job, tmp_path: Path) -> None:
    over = {"method.variant": "all", "method.layers_per_round": 2}
    assert played(job("fedbfpt"), over, tmp_path / "run")[1] == ["[method] layers_per_round"]
