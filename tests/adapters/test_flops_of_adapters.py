"""FLOPs of models with adapters are those that torch counts, to the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from test_flops import batch, counted, eager

from fedstrata.cost.flops import forward_flops, train_flops
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan

pytest.importorskip("peft", reason="adapters need the extra 'lora'")
from fedstrata.models.adapters import add_adapters

RANKS = (("b", 2), ("default", 4))
ARCHITECTURES = [
    ("bert", "classify", ("query", "value")),
    ("bert", "mlm", ("key", "output.dense")),
    ("bert", "classify", ("intermediate.dense",)),
    ("bert", "classify", ("word_embeddings", "value")),
    ("distilbert", "mlm", ("k_lin", "ffn.lin2")),
    ("electra", "classify", ("word_embeddings", "query")),
    ("modernbert", "mlm", ("Wqkv", "Wo")),
    ("gpt2", "clm", ("c_attn", "mlp.c_proj")),
]


def plans(parts: Parts) -> list[tuple[str, ...]]:
    """All adapters, those of fewer layers, one factor of them, those up to a rank; with and without a head."""
    every = [part for part in parts.each if part.kind == "adapter"]
    some = [every, [p for p in every if p.depth is not None], [p for p in every if p.depth == 2]]
    some += [[p for p in own if p.factors != factors] for own in list(some) for factors in ("a", "b")]
    some += [[p for p in own if p.above == 0] for own in list(some)]
    names = [tuple(part.name for part in own) for own in some]
    return [*names, *((*own, "head") for own in names if "head" in parts), ()]


@pytest.mark.parametrize(("architecture", "kind", "targets"), ARCHITECTURES)
@pytest.mark.parametrize("merge", ["plain", "freeze_a", "alternate"])
def test_flops_are_those_that_torch_counts(
    architecture: str, kind: str, targets: tuple[str, ...], merge: str
) -> None:
    check(eager(architecture, kind), kind, AdapterConfig(RANKS, 8.0, targets, 0.0, "gaussian", merge))


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj", "o_proj"), ("down_proj",)])
def test_flops_are_those_that_torch_counts_where_keys_have_fewer_heads(targets: tuple[str, ...]) -> None:
    """As in Llama 3, Qwen and Mistral."""
    sizes = {"vocab_size": 69, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    check(model, "clm", AdapterConfig(RANKS, 8.0, targets, 0.0, "gaussian", "plain"))


def test_a_model_whose_attention_is_put_together_otherwise_can_have_adapters() -> None:
    """Falcon's Q, K and V are one matrix, in which all queries share a key."""
    sizes = {"vocab_size": 69, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.FalconConfig(**sizes))
    config = AdapterConfig(RANKS, 8.0, ("query_key_value",), 0.0, "gaussian", "plain")
    add_adapters(model, config)
    assert [part.depth for part in find_parts(model, config).each if part.kind == "adapter"].count(0) == len(RANKS)


def check(model: Any, kind: str, config: AdapterConfig) -> None:
    """Of all plans."""
    add_adapters(model, config)
    parts, made = find_parts(model, config), batch(kind)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    for names in plans(parts):
        plan = Plan((0, 1, 2), names)
        forward, step = counted(model, parts, plan, kind, made)
        assert forward_flops(parts, plan, made.work) == forward
        assert train_flops(parts, plan, made.work) == step, names
