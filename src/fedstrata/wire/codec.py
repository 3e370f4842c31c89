"""Named tensors <-> bytes in safetensors layout, and what is checked before a received tensor is used."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError

from fedstrata.plan.kinds import Tensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
"""Wire type -> the dtype of tensors under way; with ``int8`` that of matrices, see :func:`form`."""
SCALE = ":scale"
"""Ends the name of a matrix's scales."""
LEVELS = 127
"""The largest int8; a row runs from minus it to it."""


class WireError(ValueError):
    """A message that does not hold what it must."""


def form(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What a message of tensors of these shapes holds: name -> dtype and shape.

    With ``int8`` a matrix ``[rows, ...]`` travels with ``NAME:scale``, bf16 ``[rows]``, which has the range of
    fp32. Vectors (biases, norms) are fp16: a few of their values outgrow the others a hundredfold, which one scale
    would drown.
    """
    if dtype != "int8":
        return {name: (DTYPES[dtype], shape) for name, shape in shapes.items()}
    made = {name: (torch.int8 if len(shape) > 1 else torch.float16, shape) for name, shape in shapes.items()}
    scales = {name + SCALE: (torch.bfloat16, shape[:1]) for name, shape in shapes.items() if len(shape) > 1}
    return {**made, **scales}


def quantize(tensors: Mapping[str, torch.Tensor], dtype: str) -> Tensors:
    """The tensors as they travel: cast to the wire type, no copy where they have it already.

    With ``int8`` the largest value of a row stands for ``LEVELS`` steps of one size, the row's scale.
    """
    if dtype != "int8":
        return {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    made = {name: tensor.to(torch.float16) for name, tensor in tensors.items() if tensor.ndim < 2}
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            scale = (tensor.abs().flatten(1).amax(1) / LEVELS).to(torch.bfloat16)
            steps = tensor / _along(scale, tensor)
            made[name] = steps.nan_to_num(0.0, 0.0, 0.0).round().clamp(-LEVELS, LEVELS).to(torch.int8)
            made[name + SCALE] = scale
    return made


def dequantize(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors as they are used: fp32."""
    return {
        name: tensor * _along(tensors[name + SCALE], tensor) if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }


def carry(
    tensors: Mapping[str, torch.Tensor], dtype: str, rest: Mapping[str, torch.Tensor]
) -> tuple[Tensors, Tensors]:
    """A message with error feedback: what earlier ones left out is added, what this one leaves out is told.

    So the messages' sum differs from that of the tensors by the last rest alone, however coarse the steps
    (Seide et al. 2014; Karimireddy et al. 2019). Only ``int8`` needs it; the floats leave no rest.

    Args:
        tensors: what is to be sent, fp32.
        dtype: the wire type.
        rest: tensor name -> what earlier messages left out of it; none for a first message.

    Returns:
        The tensors as they travel, and the rest to add to the next message.
    """
    if dtype != "int8":
        return quantize(tensors, dtype), {}
    whole = {name: t + rest[name].to(t.device) if name in rest else t for name, t in tensors.items()}
    sent = quantize(whole, dtype)
    back = dequantize(sent)
    return sent, {name: whole[name] - back[name] for name in whole}


def _along(scale: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return scale.float().reshape(-1, *[1] * (tensor.ndim - 1))


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
    due = form(shapes, dtype)
    if extra := tensors.keys() ^ due.keys():
        raise WireError(f"names differ from the plan's: {', '.join(sorted(extra)[:3])}")
    for name, tensor in tensors.items():
        if (tensor.dtype, tuple(tensor.shape)) != due[name]:
            wanted = " ".join(map(str, due[name]))
            raise WireError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, must be {wanted}")
        if not torch.isfinite(tensor).all():
            raise WireError(f"{name}: holds a value that is not finite")
