"""Whole states as they travel: floats, or bytes with a scale for each row; and the check of a received message."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.finite import not_finite
from fedstrata.wire.int8 import dequantize_rows, quantize_rows
from fedstrata.wire.on_disk import let_go

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""
Spec = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""What a message holds: name -> dtype and shape."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
"""Wire type -> the dtype of tensors under way; with ``int8`` that of matrices, see :func:`wire_spec`."""
SCALE = ":scale"
"""Ends the name of a matrix's scales."""


class WireError(ValueError):
    """A message that does not hold what it must."""


def wire_spec(shapes: Shapes, dtype: str) -> Spec:
    """What a message of whole states holds.

    With ``int8`` a matrix ``[rows, ...]`` travels with ``NAME:scale``, bf16 ``[rows]``, which has the range of
    fp32. Vectors (biases, norms) are fp16: a few of their values outgrow the others a hundredfold, which one scale
    would drown.
    """
    if dtype != "int8":
        return {name: (DTYPES[dtype], shape) for name, shape in shapes.items()}
    values = {name: (torch.int8 if len(shape) > 1 else torch.float16, shape) for name, shape in shapes.items()}
    scales = {name + SCALE: (torch.bfloat16, shape[:1]) for name, shape in shapes.items() if len(shape) > 1}
    return {**values, **scales}


def quantize(tensors: Mapping[str, torch.Tensor], dtype: str) -> Tensors:
    """The tensors as they travel: cast to the wire type, no copy where they have it already.

    ``int8`` is that of :class:`fedstrata.wire.codec.Int8Codec`.
    """
    if dtype != "int8":
        return {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    message: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            message[name], message[name + SCALE], _ = quantize_rows(tensor, None, None)
        else:
            message[name] = tensor.to(torch.float16)
    return message


def dequantize(message: Mapping[str, torch.Tensor], reference: Tensors | None = None) -> Tensors:
    """The tensors as they are used, fp32; added to a reference where there is one."""
    tensors: Tensors = {}
    for name, tensor in message.items():
        base = None if reference is None else reference.get(name)
        if tensor.dtype == torch.int8:
            tensors[name] = dequantize_rows(tensor, message[name + SCALE], base)
        elif not name.endswith(SCALE):
            tensors[name] = tensor.float() if base is None else base + tensor.float()
    return tensors


def check(tensors: Mapping[str, torch.Tensor], spec: Spec) -> None:
    """Compare received tensors with what was to be sent.

    Raises:
        WireError: names, shapes or types differ, or a value is not finite.
    """
    if extra := tensors.keys() ^ spec.keys():
        raise WireError(f"names differ from the plan's: {', '.join(sorted(extra)[:3])}")
    for name, tensor in tensors.items():
        if (tensor.dtype, tuple(tensor.shape)) != spec[name]:
            wanted = " ".join(map(str, spec[name]))
            raise WireError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, must be {wanted}")
    if name := not_finite(tensors):
        raise WireError(f"{name}: holds a value that is not finite")
    let_go(tensors.values())
