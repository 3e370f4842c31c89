"""FLOPs of models with adapters are those that torch counts, to the last one."""

from __future__ import annotations

import pytest
import torch
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
    model, config = eager(architecture, kind), AdapterConfig(RANKS, 8.0, targets, 0.0, "gaussian", merge)
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
