"""The table ``[train]``: how a client trains in a round."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedstrata.job.base import Positive, Seed, Table

MOST_DECAY = 1e38
"""Share of a weight that a step may take off; it is a number of 32 bits."""


class Train(Table):
    """``[train]``: how a client trains in a round."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    steps: Positive | None = None
    """Stop a client's round after so many steps."""
    batch_size: Positive = 32
    """Examples of a batch; not used with ``tokens_per_batch``."""
    tokens_per_batch: Positive | None = None
    """In place of ``batch_size``: a batch takes examples until its positions, padding included, would be more;
    at least one."""
    gradient_accumulation: Positive = 1
    """Batches of one optimizer step: it follows the mean over all their predictions."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients of a step that together are longer are shortened to this length."""
    learning_rate: Annotated[float, Field(gt=0, le=1e38)] = 5e-5
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate is multiplied by it after every local epoch; each round starts anew."""
    lr_schedule: Literal["constant", "polynomial"] = "constant"
    """Over the whole run: after the warm-up the learning rate stays, or falls to 0."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the polynomial; 1 is a straight line."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the run over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    optimizer_state: Literal["reset", "persist"] = "reset"
    """The optimizer's state is reset in every round, or persists from the client's last one."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.999]
    )
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.01
    """Of either optimizer, on everything but biases and norms."""
    max_tokens: Annotated[int, Field(ge=8, le=1_000_000)] = 128
    dropout: bool = True
    """False sets every dropout of the model to 0."""
    seed: Seed = 0
    proximal_mu: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """FedProx: adds mu/2 times the squared distance to the received weights to the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward and backward pass; weights stay fp32. ``auto`` is bf16 where it is quicker, by a fixed rule
    on the processor, the model's width and the tokens of a batch."""
    mlm_head: Literal["masked", "full"] = "masked"
    """Compute the MLM head at masked positions only, or everywhere as the papers do."""
    group_by_length: bool = True
    """Batch texts of similar length, which pads less; else batches are drawn at random."""
    padding: Literal["batch", "max"] = "batch"
    """Pad to the longest text of a batch, or to ``max_tokens``."""
    feature_cache_gb: Annotated[float, Field(ge=0)] = 8.0
    """Disk space per client, in GB, for caching a frozen encoder's hidden states; 0 turns the cache off."""
    keep_feature_cache: bool = False
    """Keep the cache when the run has ended."""

    cache_frozen_layers: bool = False
    """Compute the layers below the lowest trained one once per round and text, without dropout in them."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.tokens_per_batch is not None and "batch_size" in self.model_fields_set:
            raise ValueError("tokens_per_batch: found both batch_size and tokens_per_batch; expected one of them")
        return self

    @model_validator(mode="after")
    def _decay_fits(self) -> Self:
        if self.learning_rate * self.weight_decay > MOST_DECAY:
            raise ValueError(
                f"weight_decay: times learning_rate must be at most {MOST_DECAY:g}, found "
                f"{self.weight_decay:g} times {self.learning_rate:g}"
            )
        return self

    @model_validator(mode="after")
    def _layers_repeat(self) -> Self:
        if self.cache_frozen_layers and self.epochs == 1:
            raise ValueError(
                "cache_frozen_layers: with epochs = 1 no text repeats in a round; expected epochs > 1"
            )
        if self.cache_frozen_layers and not self.feature_cache_bytes:
            raise ValueError("cache_frozen_layers: needs room, but feature_cache_gb is 0")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the ``batch_size`` that ``tokens_per_batch`` replaces: what is written can be read again."""
        data: dict[str, Any] = dump(self)
        if self.tokens_per_batch is not None:
            del data["batch_size"]
        return data

    @property
    def width(self) -> int | None:
        """Tokens that every batch is padded to; None pads to the longest text of a batch."""
        return self.max_tokens if self.padding == "max" else None

    @property
    def feature_cache_bytes(self) -> int:
        """Bytes of disk for a client's feature cache."""
        return int(self.feature_cache_gb * 1e9)
