"""Models whose layers mix the padding in are known, and refused where examples must not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fedstrata
from fedstrata.errors import UserError
from fedstrata.models import padding
from tiny import SIZES, tiny_model, tokenizer

Jobs = Callable[..., dict[str, Any]]
MIXING: dict[str, Callable[[], Any]] = {
    "fnet": lambda: transformers.FNetConfig(
        **{key: value for key, value in SIZES.items() if key != "num_attention_heads"}
    ),
    "convbert": lambda: transformers.ConvBertConfig(**SIZES, embedding_size=32, conv_kernel_size=3, head_ratio=1),
    "nystromformer": lambda: transformers.NystromformerConfig(**SIZES, num_landmarks=4, segment_means_seq_len=4),
}
HIDDEN = {
    **MIXING,
    "big_bird": lambda: transformers.BigBirdConfig(**SIZES, block_size=4, num_random_blocks=1),
    "canine": lambda: transformers.CanineConfig(**{k: v for k, v in SIZES.items() if k != "vocab_size"}),
    "cpmant": lambda: transformers.CpmAntConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=32,
        num_attention_heads=2,
        dim_head=16,
        dim_ff=64,
        num_hidden_layers=2,
    ),
    "mobilebert": lambda: transformers.MobileBertConfig(**SIZES, embedding_size=32, intra_bottleneck_size=32),
    "reformer": lambda: transformers.ReformerConfig(
        **{
            key: SIZES[key]
            for key in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
        },
        attention_head_size=16,
        attn_layers=["lsh", "local"],
        axial_pos_embds=False,
        num_buckets=4,
    ),
    "yoso": lambda: transformers.YosoConfig(**SIZES),
}
ROTARY = {"rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
NOISE: dict[str, Any] = {
    "privacy": {"level": "example", "noise": 1.0},
    "task": {"labels": ["eye", "heart", "kidney"]},
}


def made(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForSequenceClassification.from_config(MIXING[kind]())


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("known", [True, False])
def test_layers_that_mix_the_padding_in_are_found(monkeypatch: pytest.MonkeyPatch, kind: str, known: bool) -> None:
    """By their type, and by what comes out."""
    if not known:
        monkeypatch.setattr(padding, "MIXES", ())
    assert padding.padding_matters(made(kind), 32)


@pytest.mark.parametrize("kind", HIDDEN)
def test_no_weights_hide_that_layers_mix_the_padding_in(kind: str) -> None:
    """With zeros nothing shows, and later rounds bring others; of MobileBERT padding is 0 at the start."""
    model = transformers.AutoModel.from_config(HIDDEN[kind]())
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert padding.padding_matters(model, 32)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("model_type", ["modernbert", "llama"])
def test_positions_that_turn_with_the_width_are_found(model_type: str, kind: str) -> None:
    """At two widths beyond the config's, or below it, nothing shows, whatever the weights."""
    one = {**ROTARY, "rope_type": kind, "original_max_position_embeddings": 12}
    every = {"full_attention": one, "sliding_attention": dict(one)} if model_type == "modernbert" else one
    config = transformers.AutoConfig.for_model(model_type, **SIZES, rope_parameters=every)
    model = transformers.AutoModel.from_config(config)
    assert padding.padding_matters(model, 32)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "modernbert", "gpt2"])
@pytest.mark.parametrize("width", [8, 66])
def test_padding_behind_a_mask_does_not_matter(kind: str, width: int) -> None:
    model = tiny_model(kind, "clm" if kind == "gpt2" else "mlm").train()
    assert not padding.padding_matters(model, width)
    assert model.training


def test_a_fourier_transform_needs_texts_of_one_width_at_level_example(job: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    folder = tmp_path / "fnet"
    made("fnet").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    one = {"model": {"name": str(folder)}, "method": {"rounds": 1}}
    with pytest.raises(UserError, match=r"of type 'fnet' needs train\.padding = 'max', else"):
        fedstrata.run(job("fedavg", "classify", **one, **NOISE))
    for tables in ({}, {**NOISE, "train": {"padding": "max"}}):
        config = job("fedavg", "classify", **one, **tables)
        config["output"] = {"dir": str(tmp_path / f"run-{len(tables)}")}
        assert fedstrata.run(config).score
