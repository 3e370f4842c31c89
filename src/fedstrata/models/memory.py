"""Peak memory of a training step, measured by running one step on tensors that have shapes but no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional

from fedstrata.errors import UserError, first_words
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.adapters import add_adapters
from fedstrata.models.attention import place_attention
from fedstrata.models.depth import local_depth
from fedstrata.models.dropout import drawing, place_dropout
from fedstrata.models.masked_head import head_at
from fedstrata.models.parts import find_parts
from fedstrata.models.vocabulary_loss import vocabulary_loss
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.sharing import Sharing

WEIGHT, GRADIENT = 4, 4
"""Bytes per element: of every weight, and of the gradient of every trained one."""
MOMENTS = {"adamw": 8, "sgd": 0}
"""Client optimizer -> bytes of its state per trained element."""


def step_memory(
    auto: Any,
    config: transformers.PreTrainedConfig,
    adapter: AdapterConfig | None = None,
    sharing: Sharing | None = None,
) -> Callable[[Plan, int, int, int, bool, str], int]:
    """A function that gives the peak memory of a client's training step, for a model with this config.

    Args:
        auto: the Hugging Face class of the task.
        config: the model's.
        adapter: its adapters.
        sharing: what of its parts travels; None for all that may change.

    Returns:
        (plan, rows, width, predicted, bf16, optimizer) -> bytes: all weights but those of the server's layers,
        fp32; gradients and optimizer state of what the plan trains; and what autograd keeps of a batch of ``rows``
        examples of ``width`` tokens with ``predicted`` positions through a language model's head (0: every output
        of the head). Without what the libraries themselves take. It raises a UserError where what the model
        computes depends on the values of a text, as Longformer's and X-MOD's, or torch knows no shapes of it, as
        of a mixture of experts in fp32.
    """
    config.use_cache = False
    if config.pad_token_id is None:
        config.pad_token_id = 0  # a classifier over GPT-2 asks for one
    with torch.device("meta"):
        model = auto.from_config(config)
    if adapter:
        add_adapters(model, adapter, shapes_only=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
    parts = find_parts(model, adapter)
    parts = replace(parts, sharing=sharing or parts.sharing)
    known: dict[object, int] = {}

    def memory(plan: Plan, rows: int, width: int, predicted: int, bf16: bool, optimizer: str = "adamw") -> int:
        trained = plan.learning_elements(parts)
        away = plan.away(parts)
        weights = WEIGHT * parts.elements(part for part in parts.names if part not in away)
        if not trained:
            return weights
        depths = parts.depths(plan.train)
        learns = tuple(i in depths for i in plan.local(parts))  # only their places in the local model matter
        inside = [part for part in map(parts.__getitem__, plan.train) if part.depth is not None]
        halves = tuple(sorted({(part.factors, part.above) for part in inside}))
        others = tuple(part for part in plan.train if parts[part].depth is None)
        key = (learns, halves, others, rows, width, predicted, bf16)
        if key not in known:
            try:
                known[key] = saved_bytes(model, parts, plan, (rows, width), predicted, bf16)
            except RuntimeError as error:
                raise _untold(config, error) from None
        return weights + (GRADIENT + MOMENTS[optimizer]) * trained + known[key]

    return memory


def _untold(config: Any, error: RuntimeError) -> UserError:
    """The sentence about a model of which a step without data tells nothing."""
    name, kind = f"model {config.name_or_path}", config.model_type
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return UserError(
            f"{name}: what {kind} computes depends on the values of a text, so that there is no forecast of it; "
            "fedstrata run trains it without one"
        )
    return UserError(
        f"{name}: torch does not know without numbers what {kind} computes ({first_words(error)}), so that there "
        "is no forecast of it; fedstrata run needs none"
    )


def saved_bytes(model: Any, parts: Parts, plan: Plan, shape: Sequence[int], predicted: int, bf16: bool) -> int:
    """Bytes that autograd keeps of one forward pass with a batch of ``shape`` ``[B, S]``, weights not counted."""
    names = plan.learning(parts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # storages, not sizes: the address of a freed one may be reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    place_dropout(model)
    place_attention(model)
    model.train()
    first = next(model.parameters())
    with (
        first.fake_mode if isinstance(first, torch._subclasses.FakeTensor) else torch.enable_grad(),
        local_depth(model, parts, plan.local(parts)),
        torch.random.fork_rng(devices=[]),
        drawing(lambda shape: torch.zeros(tuple(shape), dtype=torch.int16)),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        ids = torch.zeros(*shape, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if predicted:
            places = torch.zeros(predicted, dtype=torch.long)
            with head_at(model, (places, places)):
                loss = vocabulary_loss(model(**inputs).logits.flatten(0, 1), places)
        else:
            logits = model(**inputs).logits.flatten(0, -2)
            loss = functional.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long))
        total = sum(storage.nbytes() for storage in saved.values())
        del loss
    return int(total)
