"""The model in memory: what is held beside its weights changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.client.working_model import WorkingModel
from fedstrata.models.parts import find_parts
from roles import assert_same_tensors
from tiny import tiny_model

Jobs = Callable[..., dict[str, Any]]


@contextmanager
def plain(working: WorkingModel, names: Any) -> Iterator[None]:
    """Every weight is cast by autocast in every step."""
    yield


@pytest.mark.parametrize(
    ("kind", "method", "task", "tables"),
    [
        ("bert", "fedbfpt", "mlm", {"method": {"rounds": 4}}),
        ("roberta", "fedbfpt", "mlm", {"wire": {"dtype": "int8"}}),
        ("distilbert", "fedbt", "classify", {"method": {"rounds": 3}}),
        ("electra", "fedbfpt", "mlm", {}),
        ("modernbert", "fedbt", "classify", {}),
        ("gpt2", "fedbfpt", "clm", {}),
        ("bert", "fedfreezebert", "classify", {"head": {"kind": "mean"}}),
        ("electra", "fedfreezebert", "classify", {"head": {"kind": "cls"}, "train": {"feature_cache_gb": 0.0}}),
        ("bert", "fedsplitbert", "classify", {"head": {"kind": "mean"}, "method": {"critical_layer": 1}}),
    ],
)
def test_frozen_weights_held_in_bf16_change_no_bit(
    job: Jobs,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    method: str,
    task: str,
    tables: dict[str, Any],
) -> None:
    folder = model_folder(kind, head="clm") if task == "clm" else model_folder(kind)
    train = {"precision": "bf16", **tables.get("train", {})}
    made = job(method, task, **{**tables, "model": {"name": str(folder)}, "train": train})
    held = fedstrata.run(made, {"output.dir": str(tmp_path / "held")})
    monkeypatch.setattr(WorkingModel, "frozen_in_bf16", plain)
    cast = fedstrata.run(made, {"output.dir": str(tmp_path / "cast")})
    assert held.score == cast.score
    assert_same_tensors(held.folder, cast.folder)


def test_what_is_trained_stays_fp32_and_what_has_changed_is_cast_again() -> None:
    model = tiny_model()
    working = WorkingModel(model, find_parts(model), bf16=True)
    decoder, layer = model.cls.predictions.decoder, model.bert.encoder.layer[0].output.dense
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("cls."))
    for value in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.detach().fill_(value)
        with working.frozen_in_bf16(working.parts.names):
            assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
            assert bool((layer.weight == value).all())
            assert decoder.weight.dtype == torch.bfloat16, "tied to the embeddings, which are frozen"
            assert decoder.bias.dtype == torch.float32, "trained"
            assert model.bert.embeddings.word_embeddings.weight.dtype == torch.float32
            assert model.bert.encoder.layer[0].output.LayerNorm.weight.dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    with working.frozen_in_bf16(["layer.1"]):
        assert layer.weight.dtype == torch.float32, "not in the local model"
    with torch.no_grad(), working.frozen_in_bf16(working.parts.names):
        assert decoder.bias.dtype == torch.bfloat16, "nothing is trained while scoring"
