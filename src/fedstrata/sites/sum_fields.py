"""The messages of a masked sum beside a message's tensors: bytes as tensors of type uint8."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedstrata.plan.kinds import Weights
from fedstrata.wire.codec import WireError

SUMS = "masked sum"
"""In the place of a part's name, which has no space."""


def with_sums(weights: Weights, sums: Mapping[str, bytes]) -> Weights:
    """The tensors of a message with those that stand for bytes."""
    if not sums:
        return weights
    contents = {
        name: torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else EMPTY for name, b in sums.items()
    }
    return {**weights, SUMS: contents}


def without_sums(weights: Weights) -> tuple[Weights, dict[str, bytes]]:
    """The tensors of a message without those that stand for bytes, and these.

    Raises:
        WireError: they are no bytes.
    """
    contents = weights.get(SUMS, {})
    for name, tensor in contents.items():
        if tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise WireError(f"{SUMS}: {name[:100]!r} holds no bytes")
    parts = {part: tensors for part, tensors in weights.items() if part != SUMS}
    return parts, {name: tensor.numpy().tobytes() for name, tensor in contents.items()}


EMPTY = torch.zeros(0, dtype=torch.uint8)
