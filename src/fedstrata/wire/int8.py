"""Matrices as int8 with a scale for each row, and back, by blocks of rows that stay in a core's cache.

Every entry is computed from its own row alone, so the blocks change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

LEVELS = 127
"""The largest int8; a row runs from minus it to it."""
BLOCK = 1 << 15
"""Entries of a block, in whole rows."""


def quantize_rows(
    tensor: torch.Tensor, reference: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix ``[n, ...]`` fp32, less a reference and with a residual, as it travels, and what that leaves out.

    The largest value of a row stands for ``LEVELS`` steps of one size, the row's scale.

    Returns:
        Codes ``[n, ...]`` int8, scales ``[n]`` bf16, and the new residual ``[n, ...]`` fp32.
    """
    tensor = tensor.detach()
    codes = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device)
    scales = torch.empty(len(tensor), dtype=torch.bfloat16, device=tensor.device)
    left = torch.empty(tensor.shape, device=tensor.device)
    for rows in _blocks(tensor):
        whole = left[rows]
        if reference is None:
            whole.copy_(tensor[rows])
        else:
            torch.sub(tensor[rows], reference[rows].to(tensor.device), out=whole)
        if residual is not None:
            whole.add_(residual[rows].to(tensor.device))
        steps = whole.abs()
        scale = (steps.flatten(1).amax(1) / LEVELS).to(torch.bfloat16)
        torch.div(whole, _along(scale, tensor), out=steps)
        steps.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-LEVELS, LEVELS)
        codes[rows] = steps
        scales[rows] = scale
        whole.sub_(steps.mul_(_along(scale, tensor)))
    return codes, scales, left


def dequantize_rows(
    codes: torch.Tensor, scales: torch.Tensor, reference: torch.Tensor | None = None
) -> torch.Tensor:
    """The matrix ``[n, ...]`` fp32 that codes and scales hold, added to a reference where there is one."""
    tensor = torch.empty(codes.shape, device=codes.device)
    for rows in _blocks(codes):
        tensor[rows].copy_(codes[rows]).mul_(_along(scales[rows], codes))
        if reference is not None:
            tensor[rows].add_(reference[rows])
    return tensor


def _blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """Blocks of rows; one of all on a GPU, which has other caches."""
    rows, entries = len(tensor), math.prod(tensor.shape[1:])
    size = rows if tensor.device.type != "cpu" else max(1, BLOCK // max(1, entries))
    return (slice(begin, begin + size) for begin in range(0, rows, max(1, size)))


def _along(scale: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return scale.float().reshape(-1, *[1] * (tensor.ndim - 1))
