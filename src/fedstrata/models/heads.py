"""Heads over the encoder's last hidden states: one vector, or four further layers.

FedFreezeBERT, 2024, section on aggregation; P-SUM and H-SUM are Karimi et al. 2021 (Improving BERT Performance for
Aspect-Based Sentiment Analysis). With H_j the output of layer j of L, ``[B, S, H]``, and B_0 … B_3 new layers:

    cls         x = H_L at token 0
    mean        x = mean of H_L over the tokens
    psum        y_i = B_i(H_{L-i})                four branches, side by side
    hsum        y_i = B_i(y_{i-1} + H_{L-i})      four branches, each on the one before, from the top layer down

Each branch is classified from token 0; the loss is the sum of the branches' losses, the prediction the mean of
their logits. ``cls`` and ``mean`` are one branch. The new layers are BERT's, of the encoder's width, whatever the
encoder.

A model with such a head is saved as a Hugging Face folder (:mod:`fedstrata.models.headed`) and comes back by

    from fedstrata.models.heads import HeadedModel
    model = HeadedModel.from_pretrained("runs/try/model")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.utils import ModelOutput

from fedstrata.errors import UserError
from fedstrata.models.headed import HeadedConfig, plain_config, record_every_layer, write_headed


@dataclass(frozen=True)
class HeadConfig:
    """A head: the job's ``[head]``.

    Attributes:
        kind: ``cls``, ``mean``, ``psum`` or ``hsum``; empty: none of these, whatever a checkpoint has.
        classifier: one for each ``branch``, or a ``shared`` one.
        pooler: the encoder's pooler stands between token 0 and the classifier.
        average: of the branches' ``logits`` or ``probabilities``: the prediction.
        tokens: what ``mean`` is over: the tokens of the ``text``, its ``inner`` ones without the first and the
            last, or ``all`` with the padding.
    """

    kind: str
    classifier: str = "branch"
    pooler: bool = False
    average: str = "logits"
    tokens: str = "text"


BRANCHES = {"cls": 1, "mean": 1, "psum": 4, "hsum": 4}
"""Head -> hidden states it takes, from the top, and branches it has."""
KEY = "fedstrata_head"
"""Key of a config that holds its head's settings."""


@dataclass
class HeadedOutput(ModelOutput):  # type: ignore[misc]
    """Output of a model with one of our heads.

    Attributes:
        logits: the prediction, ``[B, C]``; for averaged probabilities their logarithm.
        branches: each branch's logits, ``[B, branches, C]``: texts first, as pipelines take a batch apart.
    """

    logits: torch.Tensor | None = None
    branches: torch.Tensor | None = None


class Head(nn.Module):
    """New layers, if any, and classifiers; ``config`` is an encoder's, with ``num_labels``."""

    def __init__(self, config: Any, settings: HeadConfig) -> None:
        super().__init__()
        self.kind, self.tokens = settings.kind, settings.tokens
        self.count = BRANCHES[self.kind]
        self.layers = nn.ModuleList(BertLayer(_bert(config)) for _ in range(self.count if self.count > 1 else 0))
        classifiers = self.count if settings.classifier == "branch" else 1
        self.classifiers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.num_labels) for _ in range(classifiers)
        )

    def select(self, hidden: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """The hidden states that the head takes; without parameters, so with a frozen encoder they never change.

        Args:
            hidden: hidden states from the top layer down, each ``[B, S, H]``.
            mask: 1 at tokens, 0 at padding, ``[B, S]``.

        Returns:
            ``[B, n, T, H]``: the vector of one branch (n = T = 1), or the states of four (n = 4, T = S).
        """
        if self.count > 1:
            return torch.stack(list(hidden[: self.count]), 1)
        if self.kind == "cls":
            return hidden[0][:, None, :1]
        weight = self._weight(mask)[:, :, None].to(hidden[0].dtype)
        return ((hidden[0] * weight).sum(1) / weight.sum(1))[:, None, None]

    def _weight(self, mask: torch.Tensor) -> torch.Tensor:
        if self.tokens == "all":
            return torch.ones_like(mask)
        if self.tokens == "text":
            return mask
        inner = mask.clone()
        inner[:, 0] = 0
        inner.scatter_(1, mask.sum(1, keepdim=True) - 1, 0)
        return torch.where(inner.any(1, keepdim=True), inner, mask)  # if there are no others, the ends count

    def forward(self, encoded: torch.Tensor, mask: torch.Tensor, pooler: nn.Module | None) -> torch.Tensor:
        """Logits of every branch, ``[branches, B, C]``, from :meth:`select`'s states and their mask ``[B, T]``."""
        states: Sequence[torch.Tensor] = encoded.unbind(1)
        if self.count > 1:
            low = torch.finfo(encoded.dtype).min
            padding = (1 - mask[:, None, None, :].to(encoded.dtype)) * low
            states = BRANCHING[self.kind](list(self.layers), states, padding)
        vectors = [state[:, 0] if pooler is None else pooler(state) for state in states]
        classifiers = [self.classifiers[i % len(self.classifiers)] for i in range(self.count)]
        return torch.stack([classify(x) for classify, x in zip(classifiers, vectors, strict=True)])


def psum(
    layers: Sequence[nn.Module], hidden: Sequence[torch.Tensor], mask: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Each new layer on its own hidden state: ``y_i = B_i(H_{L-i})``, four of ``[B, S, H]``."""
    return [layer(state, mask) for layer, state in zip(layers, hidden, strict=True)]


def hsum(
    layers: Sequence[nn.Module], hidden: Sequence[torch.Tensor], mask: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Each new layer on the branch before and the next hidden state: ``y_i = B_i(y_{i-1} + H_{L-i})``."""
    outputs: list[torch.Tensor] = []
    for layer, state in zip(layers, hidden, strict=True):
        outputs.append(layer(outputs[-1] + state if outputs else state, mask))
    return outputs


BRANCHING = {"psum": psum, "hsum": hsum}


class HeadedModel(transformers.PreTrainedModel):  # type: ignore[misc]
    """An encoder and a :class:`Head`, in the manner of Hugging Face's models for sequence classification.

    The head's settings stand in the encoder's config under ``fedstrata_head``. The encoder's own pooler is there
    only where ``pooler`` is set, between token 0 and the classifiers.

    Raises:
        UserError: the config names no head, or the encoder has fewer layers than branches, no pooler that was
            asked for, or a norm after its last layer.
    """

    config_class = HeadedConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        config = plain_config(config)
        super().__init__(config)
        if not getattr(config, KEY, None):
            raise UserError(f"model {config.name_or_path}: its config.json names no head of [head]")
        self.settings = settings = HeadConfig(**getattr(config, KEY))
        if not transformers.MODEL_MAPPING[type(config)]._supports_sdpa:
            config._attn_implementation = "eager"
        base = transformers.AutoModel.from_config(config)
        if config.num_hidden_layers < BRANCHES[settings.kind]:
            raise UserError(
                f"[head] kind: {settings.kind!r} takes the last four layers, {config.model_type} has "
                f"{config.num_hidden_layers}"
            )
        if extra := _after_layers(base, config.num_hidden_layers):
            raise UserError(
                f"[head] kind: {settings.kind!r} does not go with {config.model_type}, whose layers are followed "
                f"by {', '.join(extra)}"
            )
        if settings.pooler and getattr(base, "pooler", None) is None:
            raise UserError(f"[head] pooler: {config.model_type} has none")
        if not settings.pooler and getattr(base, "pooler", None) is not None:
            base.pooler = nn.Identity() if config.model_type == "layoutlm" else None  # which calls it in any case
        self.base_model_prefix = base.base_model_prefix
        setattr(self, self.base_model_prefix, base)
        self.head = Head(config, settings)
        self.branches, self.chained = BRANCHES[settings.kind], settings.kind == "hsum"
        self.post_init()
        record_every_layer(base)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        """A model of a folder or hub id; ``config`` by default the folder's own."""
        config = plain_config(config or transformers.AutoConfig.from_pretrained(name))
        return super().from_pretrained(name, *args, config=config, **options)

    def save_pretrained(self, folder: Any, *args: Any, **options: Any) -> None:
        """Write the model as a folder that comes back with its head, or not at all."""
        super().save_pretrained(folder, *args, **options)
        write_headed(Path(folder))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing, as for :class:`fedstrata.models.headed.HeadedConfig`."""

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """A new model."""
        return cls._from_config(config)

    def encode(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The hidden states of a batch that the head takes: see :meth:`Head.select`."""
        base = getattr(self, self.base_model_prefix)
        pooler = getattr(base, "pooler", None)
        try:
            if pooler is not None:
                base.pooler = nn.Identity()  # applied to the branches, not here
            output = base(**inputs, output_hidden_states=True)
        finally:
            if pooler is not None:
                base.pooler = pooler
        hidden = [output.last_hidden_state, *reversed(output.hidden_states[:-1])]
        return self.head.select(hidden, inputs["attention_mask"])

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        encoded: torch.Tensor | None = None,
        **_: Any,
    ) -> HeadedOutput:
        """Logits of a batch of token ids ``[B, S]``, or of what :meth:`encode` gave for it before."""
        if encoded is None:
            assert input_ids is not None
            attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
            encoded = self.encode(**{name: tensor for name, tensor in inputs.items() if tensor is not None})
        assert attention_mask is not None
        pooler = getattr(self, self.base_model_prefix).pooler if self.settings.pooler else None
        branches = self.head(encoded, attention_mask, pooler)
        if self.settings.average == "probabilities":
            return HeadedOutput(branches.float().softmax(-1).mean(0).log(), branches.transpose(0, 1))
        return HeadedOutput(branches.mean(0), branches.transpose(0, 1))


class HeadedEncoder:
    """What ``AutoModel`` gives of a folder with one of our heads: the encoder, without the head."""

    config_class = HeadedConfig

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:
        """The encoder of a saved model."""
        return HeadedModel.from_pretrained(name, *args, **options).base_model

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """A new encoder."""
        return transformers.AutoModel.from_config(plain_config(config), **options)


transformers.AutoConfig.register(HeadedConfig.model_type, HeadedConfig, exist_ok=True)
transformers.AutoModel.register(HeadedConfig, HeadedEncoder, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(HeadedConfig, HeadedModel, exist_ok=True)


def _after_layers(base: nn.Module, depth: int) -> list[str]:
    """What follows an encoder's stack of layers, besides a pooler; OPT's ``project_out`` is beside its stack."""
    stacks = [
        name
        for name, child in base.named_children()
        if any(isinstance(module, nn.ModuleList) and len(module) == depth for module in child.modules())
    ]
    names = [name for name, _ in base.named_children()]
    found = [name for name in names[names.index(stacks[-1]) + 1 :] if name != "pooler"] if stacks else []
    return [*found, *(name for name, _ in base.named_modules() if name.endswith("project_out"))]


def _bert(config: Any) -> Any:
    """BERT's config of an encoder's width, for layers of its kind."""

    def own(*names: str, default: Any) -> Any:
        return next((getattr(config, name) for name in names if hasattr(config, name)), default)

    bert = transformers.BertConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=own("intermediate_size", "hidden_dim", default=4 * config.hidden_size),
        hidden_act=own("hidden_act", "activation", default="gelu"),
        hidden_dropout_prob=own("hidden_dropout_prob", "dropout", default=0.1),
        attention_probs_dropout_prob=own("attention_probs_dropout_prob", "attention_dropout", default=0.1),
        layer_norm_eps=own("layer_norm_eps", default=1e-12),
    )
    bert._attn_implementation = config._attn_implementation
    return cast("Any", bert)
