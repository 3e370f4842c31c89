"""Tensors and arrays in memory that processes share: files without a name, known by their descriptors alone.

A file without a name is gone with the last process that has it open, however that ends; on Linux it is no file of
``/dev/shm`` either, whose size containers limit. A descriptor travels over a Unix socket.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstrata.wire.on_disk import ALIGNED, content

GAP = memoryview(bytes(ALIGNED))
MOST_PIECES = 1000
"""Pieces that are written at once; systems take 1024."""

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
    places, pieces, end = list[Place](), list[memoryview](), 0
    for key, tensor in tensors.items():
        places.append((key, tensor.dtype, tuple(tensor.shape), end))
        padding = -tensor.nbytes % ALIGNED
        pieces += content(tensor.detach().cpu().contiguous()), GAP[:padding]
        end += tensor.nbytes + padding
    return SharedFile(_new_file([*pieces, GAP[: 0 if end else 1]]), places)


def read_shared(descriptor: int, places: Sequence[Place]) -> dict[Key, torch.Tensor]:
    """The tensors of a file without a copy, and closes it; the memory goes with the last of them.

    Whoever writes into one of them writes into a copy of its own.
    """
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return _tensors(memory, places)


def _tensors(memory: mmap.mmap, places: Sequence[Place]) -> dict[Key, torch.Tensor]:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return {
        key: whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for key, dtype, shape, start in places
    }


def _new_file(pieces: Sequence[memoryview]) -> int:
    """A file of these pieces; written, not mapped: so the system neither clears its pages nor faults on them."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fedstrata")
    else:
        with tempfile.TemporaryFile() as file:  # without a name from the start
            descriptor = os.dup(file.fileno())
    for begin in range(0, len(pieces), MOST_PIECES):
        rest = [piece for piece in pieces[begin : begin + MOST_PIECES] if len(piece)]
        while rest:
            done = os.writev(descriptor, rest)
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][done:]
    return descriptor
