"""States below the lowest trained layer, kept for a round: the plain step's bits where dropout is off below."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedstrata
from fedstrata.client.frozen_layers import FrozenLayersPass, KeptStates, KeptTexts
from fedstrata.client.model_pass import WholePass
from fedstrata.client.trainer import drain
from fedstrata.errors import UserError
from fedstrata.plan.messages import Reply
from fedstrata.plan.plan import Plan
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.clm import CausalLM
from roles import make_runtime, sentences, train_request
from tiny import CONFIGS, tiny_model

Jobs = Callable[..., dict[str, Any]]
INDEX = np.arange(12)
NAMES = ("eye", "heart", "kidney")


@dataclass
class StillBelow(WholePass):
    """The plain step with dropout off below the lowest trained layer."""

    @contextmanager
    def local_model(self) -> Iterator[None]:
        model, parts = self.working.model, self.working.parts
        with super().local_model():
            getattr(model, model.base_model_prefix).eval()
            for layer in model.get_submodule(parts.stack)[self.plan.frozen_layers(parts) :]:
                layer.train()
            yield


def made_runtime(kind: str, layers: int = 4, **train: Any) -> Any:
    if kind == "gpt2":
        return make_runtime(tiny_model("gpt2", head="clm", layers=layers, use_cache=False), CausalLM(0), **train)
    return make_runtime(
        tiny_model(kind, head="classify", layers=layers, num_labels=3), Classify(0, NAMES), **train
    )


def play(runtime: Any, plan: Plan, model_pass: Any) -> tuple[Reply, list[float]]:
    told: list[float] = []
    run = runtime.trainer.run(
        train_request(plan), sentences(), INDEX, model_pass, {}, lambda _s, _t, loss, _n: told.append(loss)
    )
    return drain(run)[0], told


def kept_pass(runtime: Any, plan: Plan, folder: Path) -> FrozenLayersPass:
    train, width = runtime.trainer.train, runtime.working.parts.hidden
    texts = KeptTexts(sentences().tokens.lengths[INDEX], width, train)
    return FrozenLayersPass(runtime.working, plan, train, INDEX, KeptStates(texts, width, folder))


def both(kind: str, plan: Plan, folder: Path, **train: Any) -> tuple[Any, ...]:
    """The plain round and the one over kept states: losses, weights and replies of each."""
    train = {"batch_size": 3, "epochs": 3, "learning_rate": 1e-3, "cache_frozen_layers": True, **train}
    results: list[Any] = []
    for make in (
        lambda runtime: StillBelow(runtime.working, plan),
        lambda runtime: kept_pass(runtime, plan, folder),
    ):
        runtime = made_runtime(kind, **train)
        reply, told = play(runtime, plan, make(runtime))
        weights = {name: p.detach().clone() for name, p in runtime.working.model.named_parameters()}
        results += [told, weights, reply]
    return tuple(results)


PLANS = [
    Plan((0, 1, 2, 3), ("layer.2", "layer.3", "head")),
    Plan((0, 1, 2, 3), ("layer.1", "head")),
    Plan((0, 3), ("layer.3", "head")),
    Plan((1, 1, 2), ("layer.2", "head")),
    Plan((0, 1, 2, 3), ("head",)),
]


@pytest.mark.parametrize("kind", [*CONFIGS, "gpt2"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plain_steps_bits(kind: str, plan: Plan, precision: str, tmp_path: Path) -> None:
    """With dropout above, and every text padded alike."""
    plain, weights, _, kept, kept_weights, _ = both(
        kind, plan, tmp_path, padding="max", max_tokens=32, precision=precision
    )
    assert kept == plain
    for name, tensor in weights.items():
        assert torch.equal(kept_weights[name], tensor), name
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.parametrize("room", [1.0, 8e-6, 1e-9])
def test_padded_as_the_batch_it_differs_by_rounding_alone(room: float, tmp_path: Path) -> None:
    """The first epoch has the plain step's bits, whatever is kept; then a text may have met other padding."""
    plain, weights, reply, kept, kept_weights, kept_reply = both("bert", PLANS[0], tmp_path, feature_cache_gb=room)
    assert kept[:4] == plain[:4]
    assert kept == pytest.approx(plain, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(kept_weights[name], tensor, atol=1e-4, rtol=1e-3)
    assert (kept_reply.flops == reply.flops) == (room == 1e-9)


def test_dropout_below_is_off_and_above_is_on(tmp_path: Path) -> None:
    plan = PLANS[0]
    runtime = made_runtime("bert", batch_size=12, epochs=2, learning_rate=1e-3, cache_frozen_layers=True)
    below, above = runtime.working.model.bert.encoder.layer[1], runtime.working.model.bert.encoder.layer[2]
    seen: list[tuple[str, bool, bool]] = []
    for name, layer in (("below", below), ("above", above)):
        layer.register_forward_hook(
            lambda m, _i, out, name=name: seen.append((name, m.training, out.requires_grad))
        )
    play(runtime, plan, kept_pass(runtime, plan, tmp_path))
    assert seen == [("below", False, False), ("above", True, True), ("above", True, True)]


@pytest.mark.parametrize("kind", ["bert", "electra", "gpt2"])
@pytest.mark.parametrize("room", [1.0, 8e-6])
@pytest.mark.parametrize("padding", ["batch", "max"])
def test_flops_are_those_that_torch_counts(
    kind: str, room: float, padding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = made_runtime(
        kind, batch_size=5, epochs=2, padding=padding, max_tokens=32, feature_cache_gb=room, steps=5,
        cache_frozen_layers=True,
    )  # fmt: skip
    runtime.working.model.set_attn_implementation("eager")
    model_pass = kept_pass(runtime, PLANS[0], tmp_path)
    with FlopCounterMode(display=False) as counter:
        reply, _ = play(runtime, PLANS[0], model_pass)
    assert reply.flops == counter.get_total_flops() > 0
    assert 0 < model_pass.kept.texts.fits.sum() < 12 or room == 1.0


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedbt", "classify", {}),
    ("fedbt", "classify", {"method": {"local_layers": {"default": 4, "client-1": 2}}, "wire": {"dtype": "int8"}}),
    ("fedbt", "regress", {"train": {"tokens_per_batch": 40, "gradient_accumulation": 2, "steps": 3}}),
    ("fedbt", "classify", {"head": {"kind": "mean", "tokens": "all"}, "train": {"padding": "max"}}),
    ("fedbfpt", "clm", {"train": {"feature_cache_gb": 8e-6}}),
]


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_a_run_is_the_plain_one_without_dropout_and_its_forecast(
    job: Jobs, tmp_path: Path, model_folder: Callable[..., Path], name: str, kind: str, tables: dict[str, Any]
) -> None:
    """Scores and losses to rounding; FLOPs to the last one, and fewer than the plain run's."""
    tables = {**tables, "train": {"batch_size": 2, "epochs": 3, "dropout": False, **tables.get("train", {})}}
    if "tokens_per_batch" in tables["train"]:
        del tables["train"]["batch_size"]
    tables["method"] = {"rounds": 3, **tables.get("method", {})}
    if kind == "clm":
        tables["model"] = {"name": str(model_folder("gpt2", head="clm", layers=4))}
    made = job(name, kind, 4, **tables)
    if "tokens_per_batch" in tables["train"]:
        del made["train"]["batch_size"]
    if kind == "regress":
        rows = [{"text": f"the heart of {i}", "label": str(i / 3)} for i in range(12)]
        path = tmp_path / "numbers.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        made["data"] = {"train": str(path), "test": str(path)}
    plain = fedstrata.run(made, {"output.dir": str(tmp_path / "plain")})
    made["train"]["cache_frozen_layers"] = True
    [forecast] = fedstrata.forecast(made).values()
    kept = fedstrata.run(made, {"output.dir": str(tmp_path / "kept")})
    assert forecast["clients"]["train_flops"] == kept.flops < plain.flops
    assert kept.bytes == plain.bytes
    assert kept.score == pytest.approx(plain.score, rel=1e-3)
    assert not list((tmp_path / "kept").rglob("frozen-layers/*"))


@pytest.mark.parametrize(
    ("name", "kind", "tables", "why"),
    [
        ("fedavg", "classify", {}, "'fedavg' as set here trains from the lowest layer up"),
        ("fedbfpt", "mlm", {}, "'mlm' draws new masks"),
        ("fedbt", "classify", {"train": {"epochs": 1}}, "with epochs = 1 no text repeats"),
        ("fedbt", "classify", {"train": {"feature_cache_gb": 0.0}}, "needs room"),
        ("fedbt", "classify", {"head": {"kind": "psum"}}, "takes the states of four layers"),
        ("fedfreezebert", "classify", {"head": {"kind": "cls"}}, "freezes the whole encoder"),
        ("fedbert", "classify", {}, "which sends activations"),
    ],
)
def test_where_nothing_can_be_kept_a_sentence_says_so(
    job: Jobs, name: str, kind: str, tables: dict[str, Any], why: str
) -> None:
    train = {"epochs": 2, **tables.get("train", {}), "cache_frozen_layers": True}
    with pytest.raises(UserError, match=why):
        fedstrata.run(job(name, kind, 4, **{**tables, "train": train}))
