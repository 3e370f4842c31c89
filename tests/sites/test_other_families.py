"""Models that read keys which their default config lacks: a site builds the same model from what it is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_in_memory import Village, same

import fedstrata
from fedstrata.errors import UserError
from fedstrata.sites import model_files
from tiny import SIZES, SPECIAL, gpt2_tokenizer, tokenizer, words

Jobs = Callable[..., dict[str, Any]]
FAMILIES: dict[str, Callable[[], Any]] = {
    "deberta-v2": lambda: transformers.DebertaV2Config(
        **SIZES,
        type_vocab_size=0,
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


def test_a_site_drops_as_much_before_the_classifier_as_the_server_says(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cls_dropout`` of DeBERTa-v2's config was left out of what a site is sent, which took another rate."""
    folder = tmp_path / "model"
    config = transformers.DebertaV2Config(**SIZES, type_vocab_size=0, cls_dropout=0.5)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    village = Village(tmp_path, monkeypatch)
    here, there = village.jobs(job("fedavg", "classify", 3, model={"name": str(folder)}, train={"steps": 1}))
    same(fedstrata.run(here), fedstrata.run(there))


@pytest.mark.parametrize("trained", [False, True])
def test_what_a_models_weights_hold_besides_parameters_is_not_lost_on_the_way(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    """A site's routers chose other experts than the server's: their bias, a buffer, was 0 there."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    sizes = {**SIZES, "vocab_size": SIZES["vocab_size"] + 1, "num_hidden_layers": 2, "num_key_value_heads": 1}
    config = transformers.Lfm2MoeConfig(**sizes, **experts, layer_types=["conv", "full_attention"])
    model = transformers.Lfm2MoeForCausalLM(config)
    if trained:
        model.model.layers[1].feed_forward.expert_bias[2] = 0.5
    model.save_pretrained(tmp_path / "model")
    gpt2_tokenizer().save_pretrained(tmp_path / "model")
    village = Village(tmp_path, monkeypatch)
    made = job("fedavg", "clm", 3, model={"name": str(tmp_path / "model")}, train={"steps": 1})
    here, there = village.jobs(made)
    if not trained:
        same(fedstrata.run(here), fedstrata.run(there))
        return
    with pytest.raises(
        UserError, match=r"hold model\.layers\.1\.feed_forward\.expert_bias, which is no parameter"
    ):
        fedstrata.run(there)


@pytest.fixture
def accents(tmp_path: Path) -> Path:
    """A model whose tokenizer tells é from e by a setting of its own, which is not the default."""
    pieces = [*SPECIAL, *("\u2581" + word for word in words())]
    folder = tmp_path / "model"
    made = transformers.AlbertTokenizer(
        vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)],
        keep_accents=True,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
    )
    made.save_pretrained(folder)
    transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def test_a_tokenizers_settings_reach_the_sites_or_are_refused(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accents: Path
) -> None:
    """transformers makes a tokenizer anew from settings beside its file: without one, sites split other words."""
    village = Village(tmp_path, monkeypatch)
    here, there = village.jobs(job("fedavg", "mlm", 3, model={"name": str(accents)}, train={"steps": 1}))
    same(fedstrata.run(here), fedstrata.run(there))
    monkeypatch.setattr(model_files, "KEYS", {**model_files.KEYS, "tokenizer_config.json": without_accents})
    there["output"]["dir"] = str(tmp_path / "refused")
    with pytest.raises(UserError, match="tokenizer has settings that do not go to sites"):
        fedstrata.run(there)


def without_accents(_table: dict[str, Any]) -> frozenset[str]:
    return model_files.SETTING_KEYS - {"keep_accents"}
