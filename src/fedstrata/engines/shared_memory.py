"""Tensors and arrays in memory that processes share: files without a name, known by their descriptors alone.

A file without a name is gone with the last process that has it open, however that ends; on Linux it is no file of
``/dev/shm`` either, whose size containers limit. A descriptor travels over a Unix socket.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ALIGN = 64
"""Bytes at whose multiples a tensor begins."""

Key = Any
"""What names a tensor of a file."""
Place = tuple[Key, torch.dtype, tuple[int, ...], int]
"""A tensor in a file: its name, dtype, shape, and where it begins."""


@dataclass(frozen=True)
class SharedFile:
    """An open file in memory and what it holds."""

    descriptor: int
    places: Sequence[Place]

    def close(self) -> None:
        """Let go of it; whoever has mapped it keeps it."""
        os.close(self.descriptor)


def write_shared(tensors: Mapping[Key, torch.Tensor]) -> SharedFile:
    """A new file with copies of tensors."""
    places, end = list[Place](), 0
    for key, tensor in tensors.items():
        places.append((key, tensor.dtype, tuple(tensor.shape), end))
        end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
    descriptor = _new_file(max(end, 1))
    memory = mmap.mmap(descriptor, 0)
    for place, tensor in zip(places, tensors.values(), strict=True):
        _tensor(memory, place).copy_(tensor)
    return SharedFile(descriptor, places)


def read_shared(descriptor: int, places: Sequence[Place]) -> dict[Key, torch.Tensor]:
    """The tensors of a file without a copy, and closes it; the memory goes with the last of them.

    Whoever writes into one of them writes into a copy of its own.
    """
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return {place[0]: _tensor(memory, place) for place in places}


def _tensor(memory: mmap.mmap, place: Place) -> torch.Tensor:
    _, dtype, shape, start = place
    count = int(np.prod(shape, dtype=np.int64))
    if not count:  # which frombuffer refuses
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).reshape(shape)


def _new_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fedstrata")
    else:
        with tempfile.TemporaryFile() as file:  # without a name from the start
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
