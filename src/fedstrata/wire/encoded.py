"""Tensors as the bytes of a message: safetensors, never a pickle."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import Spec, WireError, check


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A message: safetensors bytes, never a pickle."""
    return bytes(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def decode_tensors(message: bytes, spec: Spec) -> Tensors:
    """The tensors of a message, checked.

    Raises:
        WireError: the bytes are no safetensors file, or :func:`check` objects.
    """
    try:
        tensors: Tensors = safetensors.torch.load(message)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch has no name for
        raise WireError(f"not a safetensors message: {error}") from None
    check(tensors, spec)
    return tensors
