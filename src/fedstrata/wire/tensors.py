"""Named tensors <-> bytes in safetensors layout, and what is checked before a received tensor is used."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError

from fedstrata.core.parts import Tensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Wire type -> the dtype of tensors under way."""


class WireError(ValueError):
    """A message that does not hold what it must."""


def narrow(tensors: Mapping[str, torch.Tensor], dtype: str) -> Tensors:
    """The tensors as they travel: cast to the wire type, no copy where they have it already."""
    return {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}


def widen(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors as they are used: fp32."""
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def encode(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A message: safetensors bytes, never a pickle."""
    return bytes(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def decode(message: bytes, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Tensors:
    """The tensors of a message, checked.

    Raises:
        WireError: the bytes are no safetensors file, or :func:`check` objects.
    """
    try:
        tensors: Tensors = safetensors.torch.load(message)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch has no name for
        raise WireError(f"not a safetensors message: {error}") from None
    check(tensors, shapes, dtype)
    return tensors


def check(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Compare received tensors with what was to be sent.

    Raises:
        WireError: names, shapes or types differ, or a value is not finite.
    """
    if extra := tensors.keys() ^ shapes.keys():
        raise WireError(f"names differ from the plan's: {', '.join(sorted(extra)[:3])}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != DTYPES[dtype]:
            raise WireError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {shapes[name]}")
        if not torch.isfinite(tensor).all():
            raise WireError(f"{name}: holds a value that is not finite")
