"""FedFreezeBERT: only the head learns, in a still encoder whose states are computed once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

import fedstrata
from fedstrata.client import feature_cache as features
from fedstrata.client import scorer
from fedstrata.client.feature_cache import FeatureCache
from fedstrata.client.scorer import FeatureCaches
from fedstrata.client.setup import make_ready, resolve_auto
from fedstrata.cost.bytes import payload
from fedstrata.data.prepare import prepare
from fedstrata.errors import UserError
from fedstrata.exchanges.hidden_states import ServerTraining
from fedstrata.job.file import load
from fedstrata.methods.fedfreezebert import FedFreezeBERT
from fedstrata.models.heads import KEY, HeadConfig, HeadedModel
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams
from roles import drawn_batches

Jobs = Callable[..., dict[str, Any]]
HEADS = ("cls", "mean", "psum", "hsum")


@pytest.fixture
def frozen(job: Jobs) -> Callable[..., dict[str, Any]]:
    def make(head: str = "psum", /, **tables: Any) -> dict[str, Any]:
        tables["method"] = {"head": head, "rounds": 3, **tables.get("method", {})}
        tables["train"] = {"epochs": 2, "learning_rate": 0.01, **tables.get("train", {})}
        return job("fedfreezebert", "classify", 4, **tables)

    return make


def weights(result: fedstrata.Result) -> dict[str, torch.Tensor]:
    return load_file(result.model_folder / "model.safetensors")


@pytest.mark.parametrize(("head", "size"), [("cls", 9_228), ("mean", 9_228), ("psum", 113_442_864)])
def test_only_the_head_is_trained_and_sent(head: str, size: int) -> None:
    config = transformers.BertConfig(num_labels=3)
    setattr(config, KEY, vars(HeadConfig(head)))
    with torch.device("meta"):
        parts: Parts = find_parts(HeadedModel.from_config(config))
    plan = FedFreezeBERT().plan(parts, "classify", 3, "a", Streams(0))
    plan.check(parts)
    assert plan.train == plan.send == ("head",)
    assert plan.freeze_encoder
    assert payload(parts, plan.send) == size
    assert 2 * 5 * 5 * payload(parts, plan.send) == 50 * size, "equation 1: both ways, 5 clients, 5 rounds"
    with pytest.raises(UserError, match=r"\[head\] pooler = true"):
        FedFreezeBERT(pooler="train").plan(parts, "classify", 0, "a", Streams(0))


@pytest.mark.parametrize(
    ("head", "tables"),
    [  # heads over one vector of a text, and over every token's states
        ("cls", {}),
        ("mean", {"train": {"padding": "max"}}),
        ("mean", {"train": {"precision": "bf16"}}),
        ("psum", {}),
        ("hsum", {"train": {"padding": "max"}}),
        ("psum", {"train": {"precision": "bf16"}}),
    ],
)
def test_what_is_kept_changes_no_bit(frozen: Jobs, tmp_path: Path, head: str, tables: dict[str, Any]) -> None:
    """All kept, nothing kept, some kept: the same weights, scores and bytes; only the work differs."""
    made = []
    for name, room in (("all", 1.0), ("none", 0.0), ("some", 2e-5 if head in ("psum", "hsum") else 3e-7)):
        train = {**tables.get("train", {}), "feature_cache_gb": room}
        made.append(fedstrata.run(frozen(head, train=train), {"output.dir": str(tmp_path / name)}))
    whole, bare, some = made
    for other in (bare, some):
        assert other.score == whole.score
        assert other.bytes == whole.bytes
        assert all(tensor.equal(weights(other)[name]) for name, tensor in weights(whole).items())
    assert whole.flops < some.flops < bare.flops


def test_the_encoder_stays_and_the_head_moves(frozen: Jobs) -> None:
    made = frozen("psum")
    result = fedstrata.run(made)
    start = load_file(Path(made["model"]["name"]) / "model.safetensors")
    same = [name for name, tensor in weights(result).items() if name in start and start[name].equal(tensor)]
    assert {name for name in weights(result) if not name.startswith("head.")} == set(same)
    assert {line["part"] for line in result.transfers if line["phase"] == "train"} == {"head"}


@pytest.mark.parametrize("head", HEADS)
def test_a_client_against_plain_torch(frozen: Jobs, head: str) -> None:
    """One client, one epoch, no dropout: AdamW on the head alone, over an encoder in eval mode."""
    made = frozen(head, clients={"count": 1}, method={"rounds": 1}, train={"epochs": 1, "dropout": False})
    result = fedstrata.run(made)
    job = resolve_auto(load(made)[0])
    ready = make_ready(job, prepare(job), made["model"]["name"])
    [(client, index)] = ready.shards.items()
    model = ready.runtime.working.model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    matrices = [p for p in model.head.parameters() if p.ndim > 1]
    vectors = [p for p in model.head.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=0.01
    )
    for batch in drawn_batches(ready.runtime.trainer, index, ready.train, client=client):
        logits = model(**batch.inputs).branches
        sum(functional.cross_entropy(each, batch.targets) for each in logits.unbind(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        if not name.endswith(
            "key.bias"
        ):  # softmax takes no notice of it: its gradient is rounding, Adam's step is not
            assert torch.allclose(weights(result)[name], parameter, atol=2e-4), name


def test_the_encoder_runs_once(frozen: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over each training and each test text once, however many epochs, rounds and scores there are."""
    seen: list[int] = []
    original = FeatureCache._encode

    def counting(self: FeatureCache, chosen: Any) -> Any:
        seen.append(len(chosen))
        return original(self, chosen)

    monkeypatch.setattr(features.FeatureCache, "_encode", counting)
    fedstrata.run(frozen("mean"))
    assert sum(seen) == 12 + 12


def test_kept_states_go_with_the_end_or_stay_on_request(frozen: Jobs, tmp_path: Path) -> None:
    fedstrata.run(frozen("cls"))
    assert not list((tmp_path / "run").rglob("features*"))
    made = frozen("cls", train={"keep_feature_cache": True}, output={"dir": str(tmp_path / "kept")})
    fedstrata.run(made)
    sizes = {path.parent.parent.name: path.stat().st_size for path in (tmp_path / "kept").rglob("features.f32")}
    assert sizes == {"client-0": 4 * 128, "client-1": 4 * 128, "client-2": 4 * 128, "state": 12 * 128}


def test_kept_states_hold_no_file_open(frozen: Jobs, tmp_path: Path) -> None:
    """There may be more clients than files that a process may have open."""
    job = resolve_auto(load(frozen("mean"))[0])
    ready = make_ready(job, prepare(job), frozen("mean")["model"]["name"])
    caches, before = ready.runtime.caches, len(os.listdir("/dev/fd"))
    for client, index in ready.shards.items():
        caches.open(ready.train, index, tmp_path / client).inputs(index)
    assert len(os.listdir("/dev/fd")) == before


def test_states_of_other_weights_or_texts_are_not_used(frozen: Jobs, tmp_path: Path) -> None:
    job = resolve_auto(load(frozen("mean"))[0])
    ready = make_ready(job, prepare(job), frozen("mean")["model"]["name"])
    working, index = ready.runtime.working, np.arange(5)

    def states() -> torch.Tensor:
        """Of a process that begins anew."""
        return FeatureCaches(*opened).open(ready.train, index, tmp_path / "kept").inputs(index)["encoded"]

    opened = working, ready.runtime.trainer.task, ready.runtime.trainer.train, lambda done, total: None
    first = states()
    header = (tmp_path / "kept" / "features.json").read_text()
    assert states().equal(first)
    with torch.no_grad():
        working.model.bert.encoder.layer[0].output.dense.bias.add_(1.0)
    assert not states().equal(first)
    assert (tmp_path / "kept" / "features.json").read_text() != header


def test_a_frozen_encoder_is_hashed_once_for_all_clients(frozen: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []

    def counting(model: Any) -> str:
        hashed.append(model)
        return features.encoder_digest(model)

    monkeypatch.setattr(scorer, "encoder_digest", counting)
    fedstrata.run(frozen("mean"))
    assert len(hashed) == 1


def test_the_head_is_said_once(frozen: Jobs, job: Jobs) -> None:
    assert load(job("fedfreezebert", "classify"))[0].head.kind == "psum"
    assert load(job("fedfreezebert", "classify", head={"kind": "hsum"}))[0].head.kind == "hsum"
    with pytest.raises(UserError, match=r"\[method\] head: is 'psum', but \[head\] kind is 'hsum'"):
        load(frozen("psum", head={"kind": "hsum"}))
    with pytest.raises(UserError, match="not with 'mlm'"):
        load(job("fedfreezebert", "mlm"))


def test_it_goes_with_a_pooler_a_server_rule_and_own_test_rows(frozen: Jobs, tmp_path: Path) -> None:
    """And with FedProx's term."""
    made = frozen("hsum", head={"pooler": True, "classifier": "shared"}, server={"optimizer": "adam"})
    made["method"]["pooler"] = "train"
    made["train"]["proximal_mu"] = 0.1
    made["clients"]["test"] = 0.5
    del made["data"]["test"]
    result = fedstrata.run(made)
    assert {line["part"] for line in result.transfers if line["phase"] == "train"} == {"pooler", "head"}
    assert all(client["score"] for client in result.clients.values())
    again = HeadedModel.from_pretrained(result.model_folder)
    assert again.settings == HeadConfig("hsum", classifier="shared", pooler=True)


@pytest.fixture
def central(frozen: Jobs) -> Callable[..., dict[str, Any]]:
    def make(head: str = "psum", /, **tables: Any) -> dict[str, Any]:
        tables["method"] = {"variant": "centralized", **tables.get("method", {})}
        return frozen(head, client={"may_send": ["weights", "hidden_states"]}, **tables)

    return make


@pytest.mark.parametrize(
    ("head", "train"),
    [
        *((head, {}) for head in HEADS),
        ("psum", {"optimizer_state": "persist", "lr_schedule": "polynomial", "warmup_ratio": 0.2}),
    ],
)
def test_the_centralized_variant_is_the_distributed_one_with_a_single_client(
    frozen: Jobs,
    central: Jobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    train: dict[str, Any],
) -> None:
    """The server trains on what the client sent as the client would have: the same batches, the same bits."""
    monkeypatch.setattr("fedstrata.server.trainer.NAME", "client-0")  # its streams
    one = {"clients": {"count": 1}, "train": {"group_by_length": False, **train}}
    apart = fedstrata.run(frozen(head, **one), {"output.dir": str(tmp_path / "d")})
    here = fedstrata.run(central(head, **one), {"output.dir": str(tmp_path / "c")})
    assert apart.score == here.score
    assert all(tensor.equal(weights(here)[name]) for name, tensor in weights(apart).items())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("head", ["mean", "hsum"])
def test_states_go_up_once_and_the_head_comes_down_once(
    central: Jobs, tmp_path: Path, head: str, dtype: str
) -> None:
    made = central(head, wire={"dtype": dtype})
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    up = [line for line in result.transfers if line["direction"] == "up"]
    assert [(line["client"], line["phase"], line["part"]) for line in up] == [
        (f"client-{i}", "hidden_states", "hidden_states") for i in range(3)
    ]
    job = resolve_auto(load(made)[0])
    ready = make_ready(job, prepare(job), made["model"]["name"])
    for line in up:
        lengths = ready.train.tokens.lengths[ready.shards[line["client"]]]
        rows, states = (len(lengths), 1) if head == "mean" else (int(lengths.sum()), 4)
        item, scales = {"fp32": (4, 0), "fp16": (2, 0), "int8": (1, 2 * rows)}[dtype]
        assert line["bytes"] == item * rows * states * 32 + scales + 8 * len(lengths)
    down = [line for line in result.transfers if line["direction"] == "down" and line["phase"] != "setup"]
    assert [(line["client"], line["round"], line["part"]) for line in down] == [
        (f"client-{i}", 2, "head") for i in range(3)
    ]
    assert {line["part"] for line in result.transfers if line["phase"] == "setup"} == {
        "embeddings",
        "layer.0",
        "layer.1",
        "layer.2",
        "layer.3",
        "head",
    }
    for way in ("up", "down", "setup"):
        assert forecast["clients"][f"{way}_bytes"] == result.bytes[way]
    assert forecast["rounds"][0]["train_flops"] > 0 == forecast["rounds"][1]["train_flops"]
    assert not (tmp_path / "run" / "state" / "received").exists()


def test_no_token_leaves_a_client(central: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message of a run is looked into: states, their number for each text, and labels."""
    seen: list[dict[str, Any]] = []
    original = ServerTraining.take

    def watched(self: ServerTraining, client: str, message: Any, most: int) -> None:
        seen.append(message)
        original(self, client, message, most)

    monkeypatch.setattr(ServerTraining, "take", watched)
    fedstrata.run(central("cls"))
    assert [set(message) for message in seen] == [{"features", "tokens", "labels"}] * 3
    assert all(message["features"].shape == (4, 1, 32) for message in seen)
    assert all(message["tokens"].tolist() == [1] * 4 for message in seen)


def test_a_client_that_allows_weights_alone_refuses(frozen: Jobs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[client\] may_send: is .*, but .* hidden states of every text"):
        fedstrata.run(frozen("psum", method={"variant": "centralized"}))
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    with pytest.raises(UserError, match=r"\[client\] may_send"):
        fedstrata.run(frozen("psum", client={"may_send": ["hidden_states"]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("labels"), "must be one number for each text"),
        (lambda m: m.update(tokens=m["tokens"][:-1]), "must be one number for each text"),
        (lambda m: m.update(tokens=m["tokens"] - 99), "whole numbers above 0"),
        (lambda m: m.update(features=m["features"][1:]), "features: is"),
        (lambda m: m.update(features=m["features"] * float("nan")), "not finite"),
        (lambda m: m.update(labels=m["labels"] + 3), "classes from 0 to 2"),
        (lambda m: m.update(labels=m["labels"].float()), "classes from 0 to 2"),
        (lambda m: m.update(text=torch.ones(1)), "names differ"),
    ],
)
def test_hidden_states_that_cannot_be_are_refused(
    central: Jobs, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    original = ServerTraining.take

    def spoilt(self: ServerTraining, client: str, message: Any, most: int) -> None:
        change(message)
        original(self, client, message, most)

    monkeypatch.setattr(ServerTraining, "take", spoilt)
    with pytest.raises(UserError, match=f"client client-0: its hidden states cannot be used: .*{words}"):
        fedstrata.run(central("hsum"))


@pytest.mark.parametrize("state", ["reset", "persist"])
def test_the_centralized_variant_is_resumed(central: Jobs, tmp_path: Path, state: str) -> None:
    train = {"optimizer_state": state}
    whole = fedstrata.run(central("psum", train=train), {"output.dir": str(tmp_path / "whole")})

    class KilledError(BaseException):
        pass

    made = central("psum", train=train, output={"dir": str(tmp_path / "broken")})
    for round in (-1, 1):

        def dying(event: Any, at: int = round) -> None:
            if type(event).__name__ == ("Stepped" if at >= 0 else "Scored") and event.round >= max(at, 0):
                raise KilledError

        with pytest.raises(KilledError):
            fedstrata.run(made, resume=True, progress=dying)
    again = fedstrata.run(made, resume=True)
    assert again.score == whole.score
    assert again.transfers == whole.transfers
    assert again.flops == whole.flops
    assert all(tensor.equal(weights(again)[name]) for name, tensor in weights(whole).items())


def test_the_centralized_variant_scored_on_the_clients_own_rows(central: Jobs) -> None:
    made = central("mean", clients={"test": 0.5})
    del made["data"]["test"]
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    assert all(client["score"] for name, client in result.clients.items() if name != "all")
    for way in ("up", "down", "setup"):
        assert forecast["clients"][f"{way}_bytes"] == result.bytes[way]


@pytest.mark.parametrize("padding", ["batch", "max"])
def test_the_forecast_of_a_client_that_sends_states(central: Jobs, tmp_path: Path, padding: str) -> None:
    made = central("hsum", train={"padding": padding})
    [forecast] = fedstrata.forecast(made).values()
    fedstrata.run(made)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text("utf-8").splitlines()]
    clients = sum(line["flops"] for line in lines if line["client"].startswith("client-"))
    server = sum(line["flops"] for line in lines if line["client"] == "all")
    assert forecast["clients"]["server_flops"] == server > 0
    assert forecast["clients"]["train_flops"] - server == clients > 0


@pytest.mark.parametrize(
    ("variant", "printed", "also"),
    [("distributed", 5.54, "1024"), ("centralized", 5.15, "; 18.94 with the 4 that this head takes")],
)
def test_the_forecast_in_the_papers_units_is_its_table_4(
    tmp_path: Path, variant: str, printed: float, also: str
) -> None:
    """MARBERT with P-SUM, five clients, five rounds, 12,550 sentences (the paper has 12,548) at 128 tokens."""
    transformers.BertConfig(vocab_size=100_000).save_pretrained(tmp_path / "marbert")
    made = fedstrata.forecast(
        {
            "model": {"name": str(tmp_path / "marbert")},
            "task": {"kind": "classify", "labels": ["NEG", "NEU", "POS"]},
            "data": {"train": "-"},
            "clients": {"count": 5},
            "client": {"may_send": ["weights", "hidden_states"]},
            "method": {"name": "fedfreezebert", "head": "psum", "variant": variant, "rounds": 5},
        },
        count=2510,
        tokens=128,
        units="fedfreezebert",
    )
    [unit] = made["fedfreezebert"]["units"]
    assert unit["upload"] == pytest.approx(printed, abs=0.006)
    assert also in unit["what"]
