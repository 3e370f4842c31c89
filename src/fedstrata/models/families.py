"""Model families: what is known of an architecture beyond what its config and its modules say.

A new family is its entry in :data:`FAMILIES`. Any other model that is built like one of these works too, but it
cannot be split, and no message proposes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        splittable: its layers take hidden states and a mask, and nothing else that the embeddings know, so that
            some of them can be the server's.
        reads_first: its head for whole texts reads the first token's state and no other.
        presets: name -> the keys of a config, for ``[model.config] preset``.
    """

    splittable: bool = True
    reads_first: bool = True
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_ROBERTA = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
    "num_hidden_layers": 12,
}
_ROBERTA_SMALL = {**_ROBERTA, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
_ROBERTA_BASE = {**_ROBERTA, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_GPT2_SMALL = {
    "vocab_size": 50257,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
}

FAMILIES: dict[str, Family] = {
    "bert": Family(),
    "roberta": Family(presets={"roberta-small": _ROBERTA_SMALL, "roberta-base": _ROBERTA_BASE}),
    "distilbert": Family(),
    "electra": Family(),
    "modernbert": Family(splittable=False, reads_first=False),
    "gpt2": Family(reads_first=False, presets={"gpt2-small": _GPT2_SMALL}),
}
"""``model_type`` in Hugging Face's configs -> family."""
PRESETS: dict[str, dict[str, Any]] = {
    name: {"model_type": model_type, **keys}
    for model_type, family in FAMILIES.items()
    for name, keys in family.presets.items()
}
"""Name -> the keys of its config, with ``model_type``."""
SPLITTABLE = tuple(model_type for model_type, family in FAMILIES.items() if family.splittable)
"""The ``model_type`` of every family whose layers may be divided between client and server."""
NOT_TRAINED: Mapping[str, str] = {
    "albert": "cannot be trained layer by layer, all its layers have the same weights",
    "funnel": "cannot be trained layer by layer, its layers stand in blocks between which the text is shortened",
    "xlnet": "reads the end of a text at the end of a batch, where padding stands here",
}
"""``model_type`` -> why such a model is not trained."""
UNLISTED: Mapping[str, tuple[str, ...]] = {
    "deberta": ("cls_dropout", "embedding_size", "talking_head"),
    "deberta-v2": (
        *("attention_head_size", "cls_dropout", "conv_act", "conv_groups", "conv_kernel_size"),
        *("embedding_size", "norm_rel_ebd", "position_buckets", "share_att_key"),
    ),
    "modernbert": ("global_attn_every_n_layers",),
}
"""``model_type`` -> keys of a config that such a model reads, and that its default config is without."""
FP32_ALONE = ("deberta",)
"""The ``model_type`` of models that transformers computes in fp32 alone: their mask outgrows bf16."""


def check_layers(name: str, config: Any) -> None:
    """Refuse a model, called ``name``, of a kind that is not trained.

    Raises:
        UserError: it is one of :data:`NOT_TRAINED`, a Nyströmformer that cuts texts into segments: transformers
            then computes no text with a mask, or an X-MOD that does not say by which language's adapters it reads.
    """
    model_type = config.model_type
    length, landmarks = (getattr(config, key, None) for key in ("segment_means_seq_len", "num_landmarks"))
    if length != landmarks:
        raise UserError(
            f"model {name}: its config.json says num_landmarks = {landmarks}, segment_means_seq_len = {length}; "
            "expected the same number for both, else transformers computes no padded texts"
        )
    if model_type == "xmod" and config.default_language not in config.languages:
        raise UserError(
            f"model {name}: its config.json says default_language is {config.default_language!r}; "
            f"{did_you_mean(config.default_language, config.languages)}"
        )
    if why := NOT_TRAINED.get(model_type):
        raise UserError(
            f"model {name}: {model_type} {why}; expected a model built like BERT, RoBERTa, DistilBERT, ELECTRA, "
            "ModernBERT or GPT-2"
        )
