"""Tensors that wait on the disk: in a file without a name, mapped, so that only what is being read is in memory.

They are ordinary tensors on the CPU. The system keeps their pages where there is memory to spare, and writes them
out where there is none; :func:`let_go` takes them out of this process. A file is gone when nobody holds a tensor
of it any more, however the program ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from fedstrata.plan.kinds import Tensors, Weights

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape."""
LEAST = 1 << 20
"""Bytes that are worth a file; fewer stay in memory."""
ALIGNED = 64
"""Bytes at a multiple of which a tensor begins, as in torch: otherwise a product may differ in the last bit."""
_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Where the mapping of a file begins -> the mapping, as long as a tensor of it is held."""


class _File:
    """A file without a name; it is closed with what holds it."""

    def __init__(self, folder: Path, size: int) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (see the class)
        os.truncate(self.file.fileno(), size)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    def fileno(self) -> int:
        """Its descriptor."""
        return self.file.fileno()


class Place:
    """A tensor's place in a file, to be filled like a view of its memory."""

    def __init__(self, file: _File, begin: int, size: int) -> None:
        self.file, self.begin, self.size = file, begin, size

    def __len__(self) -> int:
        return self.size

    def __setitem__(self, where: slice, content: memoryview) -> None:
        at = self.begin + where.start
        while len(content):
            done = os.pwrite(self.file.fileno(), content, at)
            content, at = content[done:], at + done


def empty_on_disk(spec: Mapping[str, Kind], folder: Path) -> tuple[Tensors, dict[str, Place]]:
    """Tensors of these dtypes and shapes that wait on the disk, and the places to fill them through.

    Raises:
        OSError: the disk of ``folder`` does not take them.
    """
    begins, end = dict[str, int](), 0
    for name, (dtype, shape) in spec.items():
        begins[name], end = end, end + -(-_size(dtype, shape) // ALIGNED) * ALIGNED
    file = _File(folder, max(1, end))
    whole = _tensor(mmap.mmap(file.fileno(), max(1, end)))
    tensors, places = Tensors(), dict[str, Place]()
    for name, (dtype, shape) in spec.items():
        size = _size(dtype, shape)
        tensors[name] = whole[begins[name] : begins[name] + size].view(dtype).reshape(shape)
        places[name] = Place(file, begins[name], size)
    return tensors, places


def on_disk(weights: Mapping[str, Tensors], folder: Path) -> Weights:
    """A copy that waits on the disk of ``folder``; of less than ``LEAST`` bytes one in memory."""
    flat = {(part, name): tensor for part, own in weights.items() for name, tensor in own.items()}
    if sum(tensor.nbytes for tensor in flat.values()) < LEAST:
        return {part: {name: t.to("cpu", copy=True) for name, t in own.items()} for part, own in weights.items()}
    spec = {f"{i}": (tensor.dtype, tuple(tensor.shape)) for i, tensor in enumerate(flat.values())}
    tensors, places = empty_on_disk(spec, folder)
    copied: Weights = {part: {} for part in weights}
    for i, ((part, name), tensor) in enumerate(flat.items()):
        places[f"{i}"][0:] = content(tensor.detach().cpu().contiguous())
        copied[part][name] = tensors[f"{i}"]
    return copied


def mapped(path: Path) -> torch.Tensor:
    """The bytes of a file, which nobody may change, ``[n]`` uint8."""
    with path.open("rb") as file:
        return _tensor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether a tensor waits on the disk."""
    return _mapping(tensor) is not None


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Of those that wait on the disk: they have been read, and take no memory until they are read again."""
    for tensor in tensors:
        if memory := _mapping(tensor):
            begin = tensor.storage_offset() * tensor.element_size()
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (begin + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if size > 0:
                memory.madvise(mmap.MADV_DONTNEED, first, size)


def content(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(memory: mmap.mmap) -> torch.Tensor:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    _maps[whole.data_ptr()] = memory
    return whole


def _mapping(tensor: torch.Tensor) -> mmap.mmap | None:
    return _maps.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
