"""What a worker is made of, as bytes: its model, task and examples, with every large array beside them.

A worker's model has no values to begin with, as every request brings the weights it needs. Large arrays are not
part of the bytes: one that is mapped from a file is mapped again, others are copied once, for all workers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedstrata.job.tables import Job
from fedstrata.plan.kinds import Payload
from fedstrata.plan.parts import Parts
from fedstrata.tasks import Examples, Task
from fedstrata.wire.codec import Codec

LARGE = 1 << 14
"""Bytes from which an array is kept beside the others."""
Array = torch.Tensor | np.ndarray[Any, Any]
"""An array beside a seed's bytes."""


class NotPortableError(ValueError):
    """An object that another process cannot have; says which."""


@dataclass(frozen=True)
class Seed:
    """What a worker is made of.

    Attributes:
        job: the stage's job, every "auto" resolved; of ``[method]`` nothing is used.
        config: the model's.
        buffers: the model's, by name.
        parts: the model's.
        task: makes batches, losses and scores.
        codec: how parts travel.
        exchange: name of the exchange whose handlers answer requests.
        train: all training examples.
        test: all test examples.
    """

    job: Job
    config: Any
    buffers: Mapping[str, torch.Tensor]
    parts: Parts
    task: Task
    codec: Codec
    exchange: Payload
    train: Examples
    test: Examples


def dump_seed(seed: Seed, mapped: bool = True) -> tuple[bytes, dict[int, torch.Tensor]]:
    """A seed as bytes, and the arrays beside them by their number.

    Args:
        seed: the seed.
        mapped: a worker can map the files that arrays are mapped from; else these are copied as well.

    Raises:
        NotPortableError: something in it cannot be brought to another process.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, mapped)
    try:
        pickler.dump(seed)
    except NotPortableError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotPortableError(str(error)) from None
    content = file.getvalue()
    try:
        load_seed(content, pickler.arrays)
    except Exception as error:  # by an own class's code
        raise NotPortableError(f"reading it there ends in {type(error).__name__}: {error}") from None
    return content, pickler.arrays


def load_seed(content: bytes, arrays: Mapping[int, Array]) -> Seed:
    """The seed of :func:`dump_seed`, which this program made itself."""
    seed: Seed = _Unpickler(io.BytesIO(content), arrays).load()
    return seed


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, mapped: bool) -> None:
        super().__init__(file, protocol=5)
        self.mapped = mapped
        self.arrays: dict[int, torch.Tensor] = {}

    def persistent_id(self, found: Any) -> Any:
        if isinstance(found, np.ndarray) and found.nbytes >= LARGE and found.dtype != object:
            if self.mapped and isinstance(found, np.memmap) and _whole(found):
                return "file", str(found.filename), found.offset, found.dtype, found.shape
            number = len(self.arrays)
            self.arrays[number] = torch.from_numpy(np.array(found))
            return "array", number
        if getattr(found, "__module__", None) == "__main__":
            kind = found if isinstance(found, type) else type(found)
            raise NotPortableError(f"{getattr(kind, '__qualname__', kind)} is defined in the program that runs")
        return None


def _whole(found: np.memmap[Any, Any]) -> bool:
    """Whether an array is all that was mapped: not a piece of it, nor computed from it, which has no file."""
    mapped = found.filename is not None and not isinstance(found.base, np.memmap)
    return mapped and bool(found.flags.c_contiguous)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Mapping[int, Array]) -> None:
        super().__init__(file)
        self.arrays = arrays

    def persistent_load(self, key: Any) -> Any:
        kind, *rest = key
        if kind == "file":
            name, offset, dtype, shape = rest
            return np.memmap(name, dtype, "r", offset, shape)
        array = self.arrays[rest[0]]
        return array if isinstance(array, np.ndarray) else array.numpy()
