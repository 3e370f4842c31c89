"""Trained matrices in bf16 beside those in fp32 change no bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.client import halves as module
from fedstrata.client import trainer as trainer_module
from fedstrata.client.halves import trained_in_bf16
from fedstrata.client.working_model import WorkingModel
from fedstrata.models.parts import find_parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.sharing import Sharing
from fedstrata.tasks import Batch
from fedstrata.tasks.classify import Classify
from roles import assert_same_tensors, make_runtime, train_config, train_round
from tiny import tiny_model

Jobs = Callable[..., dict[str, Any]]
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "TOGETHER", 5_000)


@pytest.mark.parametrize(
    ("kind", "method", "task", "tables"),
    [
        ("bert", "fedavg", "mlm", {}),
        ("roberta", "fedavg", "classify", {"train": {"optimizer_state": "persist"}}),
        ("distilbert", "fedavg", "classify", {"train": {"optimizer": "sgd"}}),
        ("electra", "fedavg", "mlm", {"train": {"dropout": False}}),
        ("modernbert", "fedsplitbert", "classify", {"method": {"critical_layer": 1}}),
        ("gpt2", "fedavg", "clm", {}),
        ("bert", "fedbt", "classify", {"train": {"cache_frozen_layers": True, "epochs": 2}}),
        ("bert", "fedfreezebert", "classify", {"head": {"kind": "psum", "classifier": "shared"}}),
        ("bert", "fedavg", "classify", {"head": {"kind": "hsum"}}),
        ("bert", "fedbert", "classify", {}),
        ("bert", "fedprox", "classify", {}),
        ("bert", "fedavg", "classify", {"train": {"gradient_accumulation": 2, "max_grad_norm": 0.1}}),
    ],
)
def test_the_same_bits_as_with_casts_in_every_pass(
    job: Jobs,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    method: str,
    task: str,
    tables: dict[str, Any],
) -> None:
    config = {"head": "clm"} if task == "clm" else {"num_hidden_layers": 4}
    folder = model_folder(kind, **config)
    train = {"precision": "bf16", "weight_decay": 0.1, **tables.get("train", {})}
    made = job(method, task, **{**tables, "model": {"name": str(folder)}, "train": train})
    held = fedstrata.run(made, {"output.dir": str(tmp_path / "held")})
    monkeypatch.setattr(trainer_module, "trained_in_bf16", lambda *_: nullcontext([[]]))
    cast = fedstrata.run(made, {"output.dir": str(tmp_path / "cast")})
    assert held.score == cast.score
    assert_same_tensors(held.folder, cast.folder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_weights_come_to_what_casts_in_every_pass_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for _ in range(2):
        made = make_runtime(
            tiny_model(
                "bert", "classify", num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            ),
            Classify(0, ("eye", "heart", "kidney")),
            precision="bf16",
            device="cuda",
            optimizer="sgd",  # Adam's first steps take the signs of gradients, which rounding may turn
            learning_rate=0.1,
        )
        made.working.model.to("cuda")
        made.working.bf16 = True
        parts = made.working.parts
        train_round(made, Plan(tuple(range(parts.depth)), parts.names, parts.names))
        weights.append([p.detach().clone() for p in made.working.model.parameters()])
        monkeypatch.setattr(trainer_module, "trained_in_bf16", lambda *_: nullcontext([[]]))
    start = [p.detach().to("cuda") for p in tiny_model("bert", "classify", num_labels=3).parameters()]
    moved = max(float((p - q).abs().max()) for p, q in zip(weights[1], start, strict=True))
    assert moved > 1e-4
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * moved)


class Shrinking(Classify):
    """A task of one's own whose loss reads weights."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) + sum(p.float().square().sum() for p in model.parameters())


def test_a_loss_of_ones_own_reads_the_weights_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for _ in range(2):
        made = make_runtime(
            tiny_model("bert", "classify", num_labels=3),
            Shrinking(0, ("eye", "heart", "kidney")),
            precision="bf16",
            learning_rate=1e-2,
        )
        made.working.bf16 = True
        parts = made.working.parts
        train_round(made, Plan(tuple(range(parts.depth)), parts.names, parts.names))
        weights.append([p.detach().clone() for p in made.working.model.parameters()])
        monkeypatch.setattr(trainer_module, "trained_in_bf16", lambda *_: nullcontext([[]]))
    assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))


def working(bf16: bool = True, **config: Any) -> WorkingModel:
    model = tiny_model(**config)
    return WorkingModel(model, find_parts(model), bf16=bf16)


def test_linear_modules_hold_copies_and_the_tied_decoder_none() -> None:
    made = working()
    model, trained = made.model, dict(made.model.named_parameters())
    with trained_in_bf16(made, trained, train_config()) as halves:
        layer = model.bert.encoder.layer[0]
        assert layer.output.dense.weight.dtype == torch.bfloat16
        assert layer.output.LayerNorm.weight.dtype == torch.float32
        assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert model.cls.predictions.decoder.weight.dtype == torch.float32
        held = sum(whole.numel() for some in halves for whole, _ in some)
        assert held > 0.5 * sum(map(sum, (part.linear for part in made.parts.each if part.kind == "layer")))
        assert all(len(some) == 1 or sum(w.numel() for w, _ in some) <= module.TOGETHER for some in halves)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in trained.items()}


def test_the_fp32_matrices_are_back_after_an_error() -> None:
    made = working()
    with (
        pytest.raises(KeyboardInterrupt),
        trained_in_bf16(made, dict(made.model.named_parameters()), train_config()),
    ):
        raise KeyboardInterrupt
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "keys", [{"gradient_accumulation": 2}, {"max_grad_norm": 1.0}, {"proximal_mu": 0.1}, None]
)
def test_none_where_something_else_reads_gradients_or_products_are_fp32(keys: dict[str, Any] | None) -> None:
    made = working(bf16=keys is not None)
    with trained_in_bf16(made, dict(made.model.named_parameters()), train_config(**keys or {})) as halves:
        assert halves == [[]]


def test_none_of_a_matrix_whose_unlisted_rows_are_put_back() -> None:
    model = tiny_model(tie_word_embeddings=False)
    decoder = model.cls.predictions.decoder
    for narrowed, dtype in ((frozenset(), torch.bfloat16), ({"cls.predictions.decoder.weight"}, torch.float32)):
        parts = replace(find_parts(model), sharing=Sharing(narrowed=frozenset(narrowed)))
        made = WorkingModel(model, parts, bf16=True)
        with trained_in_bf16(made, dict(model.named_parameters()), train_config()):
            assert decoder.weight.dtype == dtype
