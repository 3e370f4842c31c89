"""Cross-entropy over a vocabulary, a few positions at a time.

Logits of a batch over a vocabulary are large: of 1,024 positions and 50,257 tokens 103 MB in bf16. Torch's
cross-entropy makes four tensors of twice that size of them, which no cache holds. Here a processor computes the
loss and its gradient of as many positions as its cache takes; the same arithmetic, and so the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

BLOCK = 1 << 19
"""Logits that are computed with at once: 2 MB in fp32."""


class _VocabularyLoss(torch.autograd.Function):
    """The sum over positions; what is kept for the backward pass are the logits as they are."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """``[n, V]`` and ``[n]`` -> a number in fp32."""
        ctx.save_for_backward(logits, targets)
        losses = torch.empty(len(targets), dtype=torch.float32)
        for some, truth, loss in _blocks(logits, targets, losses):
            loss.copy_(functional.cross_entropy(some.float(), truth, reduction="none"))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        """By the logits: their softmax, less 1 at the targets, times ``outer``."""
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for some, truth, out in _blocks(logits, targets, gradient):
            chances = torch.log_softmax(some.float(), -1)
            by_chance = torch.zeros_like(chances).scatter_(1, truth[:, None], -float(outer))
            out.copy_(torch._log_softmax_backward_data(by_chance, chances, -1, chances.dtype))
        return gradient, None


def _blocks(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same few rows of all of them."""
    rows = max(1, BLOCK // logits.shape[1])
    return zip(*(torch.split(tensor, rows) for tensor in (logits, *others)), strict=True)


def vocabulary_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy of logits ``[n, V]`` of any float dtype and targets ``[n]``, in nats, fp32."""
    if logits.device.type != "cpu":
        return functional.cross_entropy(logits.float(), targets, reduction="sum")
    made: torch.Tensor = _VocabularyLoss.apply(logits, targets)  # type: ignore[no-untyped-call]
    return made
