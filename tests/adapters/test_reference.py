"""Training and merging of adapters against the plain slow way: a loop over peft's own model, sums of products."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata
from fedstrata.methods import METHODS
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.checkpoints import auto_class
from fedstrata.models.memory import saved_bytes, step_memory
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.tasks.classify import Classify
from roles import drawn_batches, make_runtime, train_round
from tiny import saved_models, tiny_config, tiny_model

peft = pytest.importorskip("peft", reason="adapters need the extra 'lora'")
from fedstrata.models.adapters import adapted_modules, add_adapters, without_adapters
from fedstrata.server.aggregate import WeightedMean
from fedstrata.server.products import ExactMean

Jobs = Callable[..., dict[str, Any]]
LABELS = ("a", "b", "c")
STILL: dict[str, Any] = {"num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def config(merge: str = "plain", **changes: Any) -> AdapterConfig:
    given = {"ranks": (("default", 4),), "alpha": 8.0, "targets": None, "dropout": 0.0, "init": "gaussian"}
    return AdapterConfig(**{**given, **changes}, merge=merge)  # type: ignore[arg-type]


def adapted_model(chosen: AdapterConfig, architecture: str = "bert") -> Any:
    model = tiny_model(architecture, "classify", **STILL)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        add_adapters(model, chosen)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # in peft's own wrapper
@pytest.mark.parametrize("merge", ["plain", "freeze_a"])
def test_a_client_trains_as_a_plain_loop_over_a_peft_model_does(merge: str) -> None:
    """To the bit: the model is peft's own, wrapped by peft, and the loop knows nothing of parts."""
    chosen = config(merge)
    ours = adapted_model(chosen)
    start = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    parts = find_parts(ours, chosen)
    keys = {"batch_size": 4, "learning_rate": 1e-2, "optimizer_state": "persist", "epochs": 2}
    runtime = make_runtime(ours, Classify(0, LABELS), parts=parts, **keys)
    plan = make_plan(METHODS["fedavg"](), parts, "classify", 0, "a", Streams(0))
    batches = drawn_batches(runtime.trainer, np.arange(12))
    train_round(runtime, plan)

    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["pooler", "classifier"]
    )
    theirs = peft.get_peft_model(tiny_model("bert", "classify", **STILL), lora)
    for name, parameter in theirs.base_model.model.named_parameters():
        plain = name.replace(".modules_to_save.default", "")
        if "original_module" not in name:
            parameter.data.copy_(start[plain])
        if merge == "freeze_a" and "lora_A" in name:
            parameter.requires_grad_(False)
    learning = [p for p in theirs.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in learning if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    theirs.train()
    for made in batches:
        logits = theirs(**made.inputs).logits
        torch.nn.functional.cross_entropy(logits, torch.as_tensor(made.targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(theirs.base_model.model.named_parameters())
    moved = 0
    for name, parameter in ours.named_parameters():
        wrapped = re.sub(r"(classifier|pooler)\.", r"\1.modules_to_save.default.", name)
        assert torch.equal(parameter, expected[wrapped]), name
        moved += not torch.equal(parameter, start[name])
    assert moved == len(learning)


def test_one_client_is_centralized_lora_to_the_bit(job: Jobs) -> None:
    tables: dict[str, Any] = {
        "adapter": {"kind": "lora", "rank": 4, "merge": "plain", "dropout": 0.1},
        "clients": {"count": 1},
        "train": {"optimizer_state": "persist", "learning_rate": 1e-3},
    }
    folder = job()["output"]["dir"]
    runs = [
        fedstrata.run(job(name, "classify", 3, **tables, output={"dir": f"{folder}/{name}"}, method={"rounds": 3}))
        for name in ("fedavg", "centralized")
    ]
    one, other = (saved_models(run.folder) for run in runs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert runs[0].score == runs[1].score


def drawn(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """What a client might send of every adapter."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    return {name: 0.1 * torch.randn(model.get_parameter(name).shape, generator=generator) for name in names}


def merged(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return without_adapters(adapted_modules(model), {**own, **weights})


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_exact_is_the_average_of_the_products(architecture: str) -> None:
    """The plain models of all clients, averaged; "plain" is another model."""
    more = {"pad_token_id": 0} if architecture == "gpt2" else {}
    model = tiny_model(architecture, "classify", **more)
    add_adapters(model, config("exact"))
    parts = find_parts(model, config("exact"))
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    sent, counts = [drawn(model, seed) for seed in range(3)], [5, 1, 10]
    exact, plain = ExactMean(adapted_modules(model), weights), WeightedMean()
    for tensors, count in zip(sent, counts, strict=True):
        exact.add(tensors, count, "")
        plain.add(tensors, count, "")
    result = exact.result()
    models = [merged(model, tensors) for tensors in sent]
    for name in models[0]:
        average = sum(count * own[name].double() for own, count in zip(models, counts, strict=True)) / 16
        assert torch.allclose(merged(model, result)[name].double(), average, atol=2e-7), name
    moved = {name for part in parts.each if part.kind == "base" for name in part.shapes}
    assert result.keys() == moved | sent[0].keys()
    other = merged(model, plain.result())
    wrong = [name for name in models[0] if not torch.allclose(other[name], merged(model, result)[name], atol=1e-3)]
    assert {name.replace(".weight", ".base_layer.weight") for name in wrong} == moved


def test_ranks_are_averaged_over_the_clients_that_have_them() -> None:
    """A component that one client lacks is not pulled towards zero, as zero-padding would."""
    chosen = config("exact", ranks=(("b", 2), ("default", 4)))
    model = adapted_model(chosen)
    parts = find_parts(model, chosen)
    plans = [make_plan(METHODS["fedavg"](), parts, "classify", 0, name, Streams(0)) for name in "ab"]
    assert set(plans[0].send) - set(plans[1].send) == {f"adapter.{i}.above2" for i in range(3)}
    assert set(plans[1].send) < set(plans[0].send)
    assert plans[1].builds(parts) == plans[0].builds(parts), "all clients compute with all components"
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    sent = [drawn(model, 0), {n: t for n, t in drawn(model, 1).items() if "above2" not in n}]
    exact = ExactMean(adapted_modules(model), weights)
    for tensors in sent:
        exact.add(tensors, 1, "")
    result = merged(model, exact.result())
    for matrix in adapted_modules(model):
        low, high = ([matrix.product(own[a], own[b]) for own in sent if a in own] for a, b in matrix.factors)
        expected = model.get_parameter(matrix.base).double() + sum(low) / 2 + high[0]
        assert torch.allclose(result[matrix.base.replace(".base_layer", "")].double(), expected, atol=2e-7)


def test_factors_alternate_by_how_often_a_layer_was_sent() -> None:
    """FedBT comes back to its lowest layer every other round, and still trains both of its factors."""
    chosen = config("alternate")
    parts, streams = find_parts(adapted_model(chosen), chosen), Streams(0)
    method = METHODS["fedbt"](cycle=2, rounds=8)
    sent: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for round in range(8):
        each = {make_plan(method, parts, "classify", round, name, streams).send for name in "abc"}
        assert len(each) == 1, "all clients send the same factor"
        for part in map(parts.__getitem__, each.pop()):
            if part.depth is not None:
                sent[part.depth].append(part.factors)
    assert sent == {0: [], 1: ["b", "a", "b", "a"], 2: ["b", "a"] * 4}


def test_factors_alternate_in_layers_that_deeper_clients_alone_send() -> None:
    chosen = config("alternate")
    parts = find_parts(adapted_model(chosen), chosen)
    method = METHODS["fedbfpt"](variant="all", local_layers={"default": 2, "deep": 3}, rounds=4)
    sent = [make_plan(method, parts, "mlm", round, "deep", Streams(0)).send for round in range(4)]
    assert [[name for name in each if name.startswith("adapter")] for each in sent] == [
        [f"adapter.{i}.{factor}" for i in range(3)] for factor in "baba"
    ]


@pytest.mark.parametrize("name", ["fedavg", "fedbt", "fedsplitbert", "fedfreezebert"])
def test_the_head_takes_no_turns_with_the_adapters_of_a_table(name: str) -> None:
    """Neither has a depth: the head was trained in no round."""
    chosen = config("alternate", targets=("query", "word_embeddings"))
    parts = find_parts(adapted_model(chosen), chosen)
    for round in range(3):
        plan = make_plan(METHODS[name](), parts, "classify", round, "a", Streams(0))
        assert "head" in plan.train
        assert "head" in {*plan.send, *plan.keep}


def test_personal_adapters_are_trained_whole() -> None:
    chosen = config("alternate")
    parts = find_parts(adapted_model(chosen), chosen)
    plan = make_plan(METHODS["fedsplitbert"](critical_layer=1), parts, "classify", 0, "a", Streams(0))
    assert plan.send == ("adapter.0.b",)
    assert set(plan.keep) == {f"adapter.{i}.{x}" for i in (1, 2) for x in "ab"} | {"pooler", "head"}
    assert set(plan.train) == {*plan.send, *plan.keep}


def test_an_svd_start_computes_as_the_model_does() -> None:
    plain = tiny_model("bert", "classify").eval()
    model = tiny_model("bert", "classify").eval()
    add_adapters(model, config(init="svd", ranks=(("b", 2), ("default", 4))))
    ids = torch.arange(5, 25)[None]
    assert torch.allclose(model(ids).logits, plain(ids).logits, atol=2e-6)
    first = adapted_modules(model)[0]
    values = torch.linalg.svdvals(plain.get_parameter(first.base.replace(".base_layer", "")))
    for (a, b), rank in zip(first.factors, ((0, 2), (2, 4)), strict=True):
        product = first.product(model.get_parameter(a).detach(), model.get_parameter(b).detach())
        assert torch.allclose(torch.linalg.svdvals(product)[:2].float(), values[slice(*rank)], atol=1e-5)


def test_an_svd_start_is_the_same_with_any_number_of_threads() -> None:
    """Else a run that is resumed where more cores are free would have begun with another model."""
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(tiny_model("bert", "classify", 1, hidden_size=384))
            add_adapters(made[-1], config(init="svd"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, other = (model.state_dict() for model in made)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("merge", ["plain", "freeze_a"])
def test_the_memory_of_a_step_is_that_of_the_adapted_model(merge: str) -> None:
    """Every weight, gradients and moments of what is trained alone, and what autograd keeps in a real step."""
    chosen = config(merge)
    model = tiny_model("bert", "classify", num_labels=3)
    add_adapters(model, chosen)
    parts = find_parts(model, chosen)
    plan = make_plan(METHODS["fedavg"](), parts, "classify", 0, "a", Streams(0))
    forecast = step_memory(auto_class("classify"), tiny_config("bert", num_labels=3), chosen)(
        plan, 4, 16, 0, False
    )
    elements = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(p.numel() for name, p in model.named_parameters() if name in names_of(parts, plan.train))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names_of(parts, plan.train))
    kept = saved_bytes(model, parts, plan, (4, 16), 0, False)
    assert forecast == 4 * elements + 12 * trained + kept


def names_of(parts: Any, each: tuple[str, ...]) -> set[str]:
    return {name for part in each for name in parts.shapes[part]}
