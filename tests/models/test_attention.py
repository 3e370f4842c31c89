"""The attention of a training step against a plain one, and against each architecture's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from fedstrata.client.dropout import DropoutRng
from fedstrata.models.attention import NAME, attention, place_attention
from fedstrata.models.dropout import keep_mask, place_dropout, stream
from tiny import tiny_model

CPU = torch.device("cpu")
KINDS = ["bert", "roberta", "distilbert", "electra", "modernbert", "gpt2"]
LOUD = {"distilbert": ("dropout", "attention_dropout"), "modernbert": ("attention_dropout", "embedding_dropout")}
LOUD["gpt2"] = ("attn_pdrop", "resid_pdrop", "embd_pdrop")


def head(causal: bool = False) -> nn.Module:
    """What transformers hands over as the module."""
    module = nn.Module()
    module.is_causal = causal  # type: ignore[assignment]
    return module


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value ``[B, h, S, d]``, as the transposes that models make."""
    made = torch.randn(3, shape[0], shape[2], shape[1], shape[3]).to(dtype)
    return [tensor.transpose(1, 2).requires_grad_() for tensor in made]


def plain(rows: list[torch.Tensor], seen: torch.Tensor | None, keep: torch.Tensor, factor: float) -> torch.Tensor:
    """Softmax attention, ``[B, S, h, d]``, by its formula."""
    query, key, value = rows
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) * keep.view(scores.shape) * factor @ value).transpose(1, 2)


def padded() -> torch.Tensor:
    """Three texts of 9, 7 and 2 tokens."""
    return (torch.arange(9) < torch.tensor([9, 7, 2])[:, None])[:, None, None]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "padding", "padding of every query", "causal"])
def test_values_and_gradients_are_those_of_the_formula(dropout: float, dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(0)
    rows = drawn((3, 4, 9, 16), dtype)
    seen = {"none": None, "causal": None, "padding": padded()}.get(mask, padded().expand(3, 1, 9, 9).contiguous())
    with DropoutRng(1, CPU).fork():
        out, _ = attention(head(mask == "causal"), *rows, seen, dropout, is_causal=None)
    double = [row.detach().double().requires_grad_() for row in rows]
    keep, factor = keep_mask(DropoutRng(1, CPU).words, (12, 9, 9), dropout, torch.float64)
    looks = torch.ones(9, 9, dtype=torch.bool).tril() if mask == "causal" else seen
    expected = plain(double, looks, keep, factor if dropout else 1.0)
    gradient = torch.randn(out.shape).to(dtype)
    out.backward(gradient)
    expected.backward(gradient.double())
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3  # bf16 keeps 8 bits: 4e-3 for one rounding
    for made, wanted in zip(
        (out, *(row.grad for row in rows)), (expected, *(d.grad for d in double)), strict=True
    ):
        assert made is not None
        assert wanted is not None
        assert made.dtype == dtype
        assert float((made.double() - wanted).detach().norm() / wanted.detach().norm()) < tolerance


def test_where_torchs_own_is_as_good_it_is_torchs_own() -> None:
    """Out of training, and in fp32 without dropout: to the bit."""
    torch.manual_seed(0)
    rows = drawn((3, 4, 9, 16), torch.float32)
    half = [row.detach().bfloat16() for row in rows]
    with DropoutRng(1, CPU).fork():
        out, _ = attention(head(), *rows, padded())
        other, _ = attention(head(), *half, padded())
    assert torch.equal(out, functional.scaled_dot_product_attention(*rows, attn_mask=padded()).transpose(1, 2))
    plainly = functional.scaled_dot_product_attention(*half, attn_mask=padded()).transpose(1, 2)
    assert torch.equal(attention(head(), *half, padded())[0], plainly)
    assert not torch.equal(other, plainly), "in training"


def step_of(model: nn.Module, ids: torch.Tensor, seen: torch.Tensor, bf16: bool) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step from the stream of seed 4."""
    model.train()
    with DropoutRng(4, CPU).fork(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(input_ids=ids, attention_mask=seen, labels=ids.masked_fill(seen == 0, -100)).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], nn.Module]:
    """Makes of a model transformers' own with eager attention, whose functional dropout draws from the stream."""

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        words = stream()
        if not training or not p or words is None:
            return input
        mask, factor = keep_mask(words, input.shape, p, input.dtype)
        return input * mask * factor

    def make(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if config := getattr(module, "config", None):
                config._attn_implementation = "eager"
        return model

    monkeypatch.setattr(functional, "dropout", dropout)
    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_every_architecture_learns_as_with_eager_attention(
    kind: str, bf16: bool, eager: Callable[[nn.Module], nn.Module]
) -> None:
    loud = LOUD.get(kind, ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    model = tiny_model(kind, "clm" if kind == "gpt2" else "mlm", **dict.fromkeys(loud, 0.2))
    own = copy.deepcopy(model)
    place_dropout(own)
    place_attention(own)
    assert own.config._attn_implementation == NAME
    torch.manual_seed(0)
    ids, seen = torch.randint(5, 60, (3, 9)), padded()[:, 0, 0].long()
    loss, gradients = step_of(own, ids, seen, bf16)
    wanted, expected = step_of(eager(model), ids, seen, bf16)
    assert loss == pytest.approx(wanted, rel=1e-3 if bf16 else 1e-6)
    assert gradients.keys() == expected.keys()
    error = torch.cat([(gradients[name] - expected[name]).flatten() for name in expected]).norm()
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert float(error / whole) < (2e-2 if bf16 else 1e-6)


def test_a_model_whose_own_code_tells_torchs_attention_by_its_name_keeps_it() -> None:
    """By another name Falcon's layers took the mask for numbers to add, and looked at the tokens to come."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.AutoModelForSequenceClassification.from_config(transformers.FalconConfig(**sizes)).eval()
    model.config.pad_token_id = 0
    ids, seen = torch.arange(5, 32).view(3, 9), padded()[:, 0, 0].long()
    wanted = model(input_ids=ids * seen, attention_mask=seen).logits
    place_attention(model)
    torch.testing.assert_close(model(input_ids=ids * seen, attention_mask=seen).logits, wanted)


def test_the_name_is_in_no_config_file(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path / "before")
    place_attention(model)
    model.config.save_pretrained(tmp_path / "after")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("before", "after")]
    assert texts[0] == texts[1]
