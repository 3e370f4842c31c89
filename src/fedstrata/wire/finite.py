"""Whether tensors hold a number everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """The first tensor that holds a value that is not finite; empty if all are finite."""
    return next((name for name, tensor in tensors.items() if not all_finite(tensor)), "")


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN, as far as there are values; no copy.

    What is not finite makes the sum so too; where the sum alone has outgrown its type, the values decide.
    """
    if tensor.is_meta or not (tensor.is_floating_point() and tensor.numel()):
        return True
    if math.isfinite(float(tensor.sum())):
        return True
    least, largest = torch.aminmax(tensor)  # NaN, if there is one
    return bool(torch.isfinite(least) & torch.isfinite(largest))
