"""Models that read keys which their default config lacks: a site builds the same model from what it is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_in_memory import Village, same

import fedstrata
from tiny import SPECIAL, tokenizer, words

Jobs = Callable[..., dict[str, Any]]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(words()),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "type_vocab_size": 2,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "deberta-v2": lambda: transformers.DebertaV2Config(
        **{**SIZES, "type_vocab_size": 0},
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        conv_kernel_size=3,
        conv_act="gelu",
    ),
    "deberta": lambda: transformers.DebertaConfig(
        **SIZES, relative_attention=True, pos_att_type=["c2p"], talking_head=True
    ),
    "convbert": lambda: transformers.ConvBertConfig(**SIZES, embedding_size=32, conv_kernel_size=5),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_site_builds_the_model_of_the_server(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = tmp_path / "model"
    transformers.AutoModelForMaskedLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    village = Village(tmp_path, monkeypatch)
    here, there = village.jobs(job("fedavg", "mlm", 3, model={"name": str(folder)}, train={"steps": 1}))
    same(fedstrata.run(here), fedstrata.run(there))
