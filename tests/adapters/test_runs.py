"""Whole runs with adapters: forecast, resumption, sites, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_in_memory import NAMES, Village, same

import fedstrata
from fedstrata.errors import UserError
from tiny import saved_models

peft = pytest.importorskip("peft", reason="adapters need the extra 'lora'")

Jobs = Callable[..., dict[str, Any]]
OWN = {"clients": {"test": 0.3}}


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch)


def lora(merge: str, rank: Any = 2, **keys: Any) -> dict[str, Any]:
    return {"adapter": {"kind": "lora", "rank": rank, "merge": merge, **keys}}


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


RANKS = {"default": 2, "client-1": 4}
DELTA = {"codec": "delta", "bits": 4, "density": 0.25}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "classify", lora("plain")),
    ("fedavg", "mlm", lora("freeze_a")),
    ("fedavg", "classify", {**lora("alternate"), "method": {"rounds": 3}, "wire": {"dtype": "int8"}}),
    ("fedavg", "classify", {**lora("exact"), "wire": {"dtype": "fp16"}}),
    ("fedavg", "classify", {**lora("alternate"), "method": {"rounds": 4}, "wire": DELTA}),
    ("fedavg", "classify", {**lora("alternate", RANKS), "clients": {"fraction": 0.67}, "method": {"rounds": 4}}),
    ("fedavg", "classify", lora("exact", RANKS)),
    ("fedavg", "classify", {**lora("plain", targets=["word_embeddings", "dense"]), **OWN}),
    ("fedprox", "classify", {**lora("freeze_a", init="svd"), "train": {"proximal_mu": 0.5}}),
    ("fedadam", "classify", lora("alternate")),
    ("fedbfpt", "mlm", {**lora("exact"), "method": {"rounds": 3}}),
    ("fedbt", "classify", {**lora("alternate"), "method": {"rounds": 4, "cycle": 2}}),
    ("fedsplitbert", "classify", {**lora("alternate"), **OWN, "method": {"rounds": 3}}),
    ("fedsplitbert", "classify", {**lora("exact", RANKS), **OWN}),
    ("fedfreezebert", "classify", {**lora("plain"), "head": {"kind": "hsum"}, "model_layers": 4}),
    ("fedbert", "classify", {**lora("exact"), "method": {"mode": "parallel", "lower": 1}}),
    ("fedbert", "mlm", {**lora("alternate"), "method": {"mode": "share", "lower": 1, "upper": 1}}),
    ("fedbert", "classify", {**lora("freeze_a"), **OWN, "method": {"mode": "emb-avg", "upper": 1}}),
    ("centralized", "classify", lora("alternate", RANKS)),
]
SPLIT = {"client": {"may_send": ["weights", "activations"]}}


def made(job: Jobs, name: str, kind: str, tables: dict[str, Any]) -> dict[str, Any]:
    tables = {key: dict(table) if isinstance(table, dict) else table for key, table in tables.items()}
    config = job(name, kind, tables.pop("model_layers", 3), **SPLIT, **tables)
    if "test" in config["clients"]:
        del config["data"]["test"]
    return config


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_a_run_costs_what_was_forecast_and_ends_in_the_same_bits_when_killed(
    job: Jobs, name: str, kind: str, tables: dict[str, Any], tmp_path: Path
) -> None:
    config = made(job, name, kind, tables)
    costs = fedstrata.forecast(config)[name]["clients"]
    run = fedstrata.run(config)
    assert run.bytes == {
        "up": costs["up_bytes"],
        "down": costs["down_bytes"],
        "setup": costs["setup_bytes"],
    }
    if kind != "mlm":  # the number of masked positions is drawn
        assert run.flops == costs["train_flops"]
    base = {line["part"] for line in run.transfers if line["phase"] != "setup"}
    assert not any(part.startswith(("layer", "embeddings")) for part in base), "base weights are shipped once"

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 1:
            raise KeyboardInterrupt

    again = {**config, "output": {"dir": str(tmp_path / "again")}}
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(again, progress=dying)
    resumed = fedstrata.run(again, resume=True)
    one, other = saved_models(run.folder), saved_models(resumed.folder)
    assert one.keys() == other.keys()
    assert one
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (run.score, run.bytes, run.flops) == (resumed.score, resumed.bytes, resumed.flops)


SITES = [
    ("fedavg", {**lora("alternate", init="svd"), "method": {"rounds": 3}}),
    ("fedavg", lora("exact", {"default": 2, "b": 4})),
    ("fedsplitbert", {**lora("freeze_a"), **OWN}),
    ("fedbert", {**lora("alternate"), **SPLIT, "method": {"lower": 1}}),
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # in peft's own wrapper
@pytest.mark.parametrize(("name", "tables"), SITES)
def test_between_sites_a_run_with_adapters_ends_in_the_same_bits(
    job: Jobs, village: Village, name: str, tables: dict[str, Any]
) -> None:
    here, there = village.jobs(job(name, "classify", 3, **tables))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    run = fedstrata.run(there)
    same(fedstrata.run(here), run)
    if name == "fedsplitbert":
        [model] = (village.folder / "federation" / "sites" / "a" / "state" / "models").iterdir()
        auto, ids = transformers.AutoModelForSequenceClassification, torch.arange(5, 25)[None]
        base = json.loads((model / "adapter" / "adapter_config.json").read_text("utf-8"))[
            "base_model_name_or_path"
        ]
        begun = auto.from_pretrained(base, config=transformers.AutoConfig.from_pretrained(model / "adapter"))
        whole = peft.PeftModel.from_pretrained(begun, model / "adapter").eval()
        assert torch.allclose(whole(ids).logits, auto.from_pretrained(model).eval()(ids).logits, atol=2e-6)


REFUSED = [
    ("fedadam", lora("exact"), r"\[adapter\] merge: 'exact' .* \[server\] optimizer = 'adam'"),
    ("fedavg", {**lora("exact"), "wire": {"dtype": "int8"}}, r"which 'int8' would round"),
    ("fedavg", {**lora("exact"), "wire": DELTA}, r"which wire.codec = 'delta' would round"),
    (
        "fedbt",
        {**lora("plain"), "train": {"cache_frozen_layers": True, "epochs": 2}},
        r"\[train\] cache_frozen_layers: goes with layers that are trained themselves",
    ),
    (
        "fedbert",
        {**lora("alternate"), "method": {"mode": "parallel"}, **SPLIT},
        r"'alternate' takes turns in what clients send",
    ),
    ("fedavg", lora("plain", {"client-9": 4}), r"\[adapter\] rank: no client 'client-9'"),
    ("fedavg", lora("plain", 64), r"\[adapter\] rank: is 64, but bert.encoder.* is only 32 by 32"),
    (
        "fedavg",
        lora("plain", targets=["quary"]),
        "is called 'quary'; expected some of: query, key, value, output.dense, intermediate.dense$",
    ),
    ("fedavg", lora("exact", targets=["word_embeddings"]), r"moves matrices of the layers, not 'word_embeddings'"),
    (
        "fedavg",
        lora("plain", init="svd", targets=["query", "word_embeddings"]),
        r"targets: init = 'svd' takes apart matrices of the layers, not 'word_embeddings'",
    ),
    ("fedavg", {"adapter": {"rank": 4}}, r"rank: goes with kind = 'lora' and only with it"),
]


@pytest.mark.parametrize(("name", "tables", "sentence"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_trained(
    job: Jobs, name: str, tables: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        fedstrata.forecast(job(name, "classify", 3, **tables))


def test_a_table_that_the_decoder_shares_gets_no_adapter(job: Jobs) -> None:
    with pytest.raises(UserError, match="'word_embeddings' is also the decoder of this task's head"):
        fedstrata.forecast(job("fedavg", "mlm", 3, **lora("plain", targets=["word_embeddings"])))


@pytest.mark.parametrize("merge", ["alternate", "freeze_a"])
def test_an_adapter_of_a_table_learns_where_its_b_is_trained_first_or_alone(job: Jobs, merge: str) -> None:
    made = job("fedavg", "classify", **lora(merge, targets=["word_embeddings"]), method={"rounds": 1})
    run = fedstrata.run(made)
    [before, after] = (
        load_file(Path(folder) / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
        for folder in (made["model"]["name"], run.model_folder)
    )
    assert (before != after).any(1).sum() > len(before) / 2, "the words of the texts"


def test_a_plain_average_says_that_it_is_not_that_of_the_products(job: Jobs) -> None:
    notes: dict[str, tuple[str, ...]] = {}

    def listen(event: Any) -> None:
        if type(event).__name__ == "StageStarted":
            notes[merge] = event.notes

    for merge in ("plain", "freeze_a"):
        table = lora(merge)
        fedstrata.run(
            job("fedavg", "classify", **table, output={"dir": f"{job()['output']['dir']}-{merge}"}),
            progress=listen,
        )
    said = "the adapters' A and B are averaged apart, which is not the average of their products B A"
    assert said in notes["plain"]
    assert said not in notes["freeze_a"]


@pytest.mark.parametrize(
    ("name", "tables", "averaged"),
    [
        ("fedfreezebert", {"head": {"kind": "mean"}}, False),
        ("centralized", {}, False),
        ("fedbert", {"method": {"mode": "share", "lower": 1}}, False),
        ("fedbert", {"method": {"mode": "parallel"}}, True),
    ],
)
def test_nothing_is_said_of_an_average_of_adapters_that_nobody_makes(
    job: Jobs, name: str, tables: dict[str, Any], averaged: bool
) -> None:
    said: list[str] = []

    def listen(event: Any) -> None:
        if type(event).__name__ == "StageStarted":
            said.extend(event.notes)

    method = {"rounds": 1, **tables.get("method", {})}
    made = job(name, "classify", **{**lora("plain"), **SPLIT, **tables, "method": method})
    fedstrata.run(made, progress=listen)
    assert any("averaged apart" in note for note in said) == averaged


def test_adapters_of_a_model_from_scratch_name_the_start_model_that_is_kept(job: Jobs, tmp_path: Path) -> None:
    shape = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = job("fedavg", "classify", adapter={"kind": "lora", "rank": 2})
    result = fedstrata.run({**made, "model": {"config": {**shape, "intermediate_size": 32}}})
    config = json.loads((result.folder / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert Path(config["base_model_name_or_path"]) == result.folder / "start"
    assert (result.folder / "start" / "model.safetensors").exists()
