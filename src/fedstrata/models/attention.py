"""Attention of a training step.

Torch's ``scaled_dot_product_attention`` has no quick path on a CPU for training: with dropout it multiplies bf16
matrices in fp32, and without it the backward pass of its fused kernel takes longer than that. Here the scores and
their softmax are fp32; the probabilities and what is multiplied with them have the dtype of the inputs, as in the
fused kernels on GPUs (Dao et al. 2022). Else, and in fp32 without dropout, torch's own attention is used. On a GPU
it is always that, by the kernels of :data:`ON_GPU`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fedstrata.models.dropout import keep_mask, stream

NAME = "fedstrata"
"""In ``config._attn_implementation``, of a model in memory; no ``config.json`` has it."""
ON_GPU = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which plans anew for every length that batches have."""
UNUSUAL = ("position_bias", "softcap", "cache")
"""Arguments of an attention that is left to torch."""


class _Attention(torch.autograd.Function):
    """Attention of ``[N, S, D]`` over ``[N, T, D]``, N = texts times heads."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        scale: float,
        factor: float,
    ) -> torch.Tensor:
        """Add ``bias`` ``[B, 1, S or 1, T]`` to the scores; drop by ``mask`` ``[N, S, T]``, times ``factor``."""
        none = query.new_empty(1, 1, 1)
        scores = torch.baddbmm(none.float(), query.float(), key.float().mT, beta=0, alpha=scale)
        if bias is not None:
            scores.view(len(bias), -1, *scores.shape[1:]).add_(bias)
        probabilities = torch.softmax(scores, -1).to(query.dtype)
        dropped = probabilities if mask is None else probabilities * mask
        ctx.save_for_backward(query, key, value, probabilities, mask, dropped)
        ctx.scale, ctx.factor = scale, factor
        return torch.baddbmm(none, dropped, value, beta=0, alpha=factor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """By query, key and value."""
        query, key, value, probabilities, mask, dropped = ctx.saved_tensors
        (out,) = gradients
        none = query.new_empty(1, 1, 1)
        by_value = torch.baddbmm(none, dropped.mT, out, beta=0, alpha=ctx.factor)
        by_dropped = torch.baddbmm(none, out, value.mT, beta=0, alpha=ctx.factor)
        by_probability = by_dropped if mask is None else by_dropped.mul_(mask)
        by_score = torch._softmax_backward_data(by_probability, probabilities, -1, query.dtype)
        by_query = torch.baddbmm(none, by_score, key, beta=0, alpha=ctx.scale)
        by_key = torch.baddbmm(none, by_score.mT, query, beta=0, alpha=ctx.scale)
        return by_query, by_key, by_value, None, None, None, None


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: ``[B, h, S, d]`` in, ``[B, S, h, d]`` out.

    ``attention_mask`` is True where a query may look, ``[B, 1, S, T]``; without one ``is_causal`` decides.
    """
    half = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if half else query.dtype
    words = stream()
    usual = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    usual = usual and query.shape[1] == key.shape[1] and query.shape[-1] == value.shape[-1]
    usual = usual and all(options.get(name) is None for name in UNUSUAL)
    if words is None or not usual or query.device.type != "cpu" or (not dropout and dtype == torch.float32):
        with sdpa_kernel(ON_GPU) if query.is_cuda else nullcontext():
            made: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
            )
        return made
    if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        attention_mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
    mask, factor = None, 1.0
    if dropout:
        shape = (query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
        mask, factor = keep_mask(words, shape, dropout, dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast("cpu", enabled=False):
        rows = [tensor.to(dtype).reshape(-1, *tensor.shape[2:]) for tensor in (query, key, value)]
        out = _Attention.apply(*rows, _bias(attention_mask), mask, scale, factor)  # type: ignore[no-untyped-call]
    return out.view(query.shape).transpose(1, 2).contiguous(), None


def _bias(mask: torch.Tensor | None) -> torch.Tensor | None:
    """What is added to the scores: 0 where a query may look, else the lowest number.

    A query that may look nowhere looks everywhere alike, as in transformers' own attention; it is padding itself.
    """
    if mask is None:
        return None
    if not mask.stride(2):  # the same for all queries
        mask = mask[:, :, :1]
    return torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)


def place_attention(model: nn.Module) -> None:
    """Let a model that uses torch's attention call :func:`attention`, if it asks transformers which to call.

    Falcon's own code does not: by another name it takes the mask wrong, and looks at what comes after.
    """
    own = (module for module in model.modules() if isinstance(module, transformers.PreTrainedModel))
    if not all(module._supports_attention_backend for module in own):
        return
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = NAME  # type: ignore[union-attr]


def mask(*arguments: Any, device: torch.device | str = "cpu", **options: Any) -> torch.Tensor | None:
    """The mask of torch's attention. On a GPU padding has one even where there is none: to look is to wait."""
    if torch.device(device).type != "cpu" and options.get("attention_mask") is not None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made: torch.Tensor | None = sdpa_mask(*arguments, device=device, **options)
    return made


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
