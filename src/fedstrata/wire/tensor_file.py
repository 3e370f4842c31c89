"""A safetensors file on its way: written and read in pieces, tensor by tensor, never in memory a second time.

The layout is that of safetensors: 8 bytes with the head's length, the head in JSON (metadata, and dtype, shape and
place of every tensor), the tensors without gaps. The head is checked before anything is allocated for the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import WireError
from fedstrata.wire.foreign import read_json
from fedstrata.wire.on_disk import LEAST, Place, content, empty_on_disk, let_go, mapped
from fedstrata.wire.states import Spec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' names of dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
PIECE = 1 << 20
"""Most bytes of a piece."""
MOST_HEAD = 1 << 23
"""Most bytes of a head."""
JSON_ERRORS = (ValueError, KeyError, TypeError, RecursionError)
"""Raised for bytes that are no JSON, or not the table that was expected."""
Admit = Callable[[Mapping[str, str], int], None]
"""Told a file's metadata and the bytes of its tensors before they are allocated; raises WireError to refuse."""


@dataclass(frozen=True)
class TensorFile:
    """A file as it travels.

    Attributes:
        head: everything before the tensors.
        metadata: what stands in it beside the tensors.
        tensors: on the CPU, contiguous, in the order in which they travel.
    """

    head: bytes
    metadata: Mapping[str, str]
    tensors: Tensors

    def __len__(self) -> int:
        return len(self.head) + sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())

    def views(self, most: int = 1 << 62) -> Iterator[memoryview]:
        """The file's bytes, in order, without a copy: the head, then tensor by tensor, ``most`` bytes at once.

        Of tensors that wait on the disk only the one that is being given is in memory.
        """
        yield from _cut(memoryview(self.head), most)
        for tensor in self.tensors.values():
            yield from _cut(content(tensor), most)
            let_go([tensor])

    def pieces(self) -> Iterator[bytes]:
        """The file's bytes, in order, at most ``PIECE`` at once."""
        yield from map(bytes, self.views(PIECE))


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> TensorFile:
    """The file of these tensors, which must not change until it has been sent; they are not copied.

    As in safetensors they are sorted by the size of their elements, then by name, so that each is aligned.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    table: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        table[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    own = {name: tensors[name].detach().cpu().contiguous() for name in order}
    return TensorFile(len(text).to_bytes(8, "little") + text, dict(metadata), own)


class Reader:
    """Reads a file that comes in pieces of any size.

    Args:
        size: bytes of the file, as announced.
        admit: see :data:`Admit`.
        folder: on whose disk the tensors of a large file wait; None: they are in memory.

    Attributes:
        metadata: the file's, as soon as its head is there.
    """

    def __init__(self, size: int, admit: Admit = lambda metadata, size: None, folder: Path | None = None) -> None:
        self.size, self.admit, self.folder = size, admit, folder
        self.metadata: Mapping[str, str] = {}
        self.head = bytearray()
        self.tensors: Tensors | None = None
        self.places: list[memoryview | Place] = []
        self.filled = 0

    def feed(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            WireError: the file is not laid out as it should be, or is not admitted.
        """
        rest = memoryview(piece)
        while self.tensors is None and len(rest):
            wanted = self._head_size() - len(self.head)
            self.head += rest[:wanted]
            rest = rest[wanted:]
            if len(self.head) >= 8 and len(self.head) == self._head_size():
                self._allocate()
        while len(rest):
            if not self.places:
                raise WireError(f"is longer than the {self.size} bytes announced")
            place = self.places[0]
            count = min(len(rest), len(place) - self.filled)
            place[self.filled : self.filled + count] = rest[:count]
            rest, self.filled = rest[count:], self.filled + count
            if self.filled == len(place):
                self.places.pop(0)
                self.filled = 0

    def finish(self) -> TensorFile:
        """The file.

        Raises:
            WireError: it is not complete.
        """
        if self.tensors is None or self.places:
            raise WireError(f"is shorter than the {self.size} bytes announced")
        return TensorFile(bytes(self.head), self.metadata, self.tensors)

    def _head_size(self) -> int:
        """Bytes of the head as far as it is known: at first those of its length."""
        if len(self.head) < 8:
            return 8
        size = 8 + int.from_bytes(self.head[:8], "little")
        if size > min(self.size, MOST_HEAD):
            raise WireError(f"its head would have {size} of {self.size} bytes")
        return size

    def _allocate(self) -> None:
        self.metadata, specs = _read_head(self.head, self.size)
        self.admit(self.metadata, self.size - len(self.head))
        places = self._room({name: (dtype, shape) for name, (dtype, shape, _) in specs.items()})
        self.places = [place for name in specs if len(place := places[name])]

    def _room(self, spec: Spec) -> Mapping[str, memoryview | Place]:
        """Make the tensors; the places to fill them through."""
        try:
            if self.folder and self.size >= LEAST:
                self.tensors, places = empty_on_disk(spec, self.folder)
                return places
            self.tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in spec.items()}
        except (RuntimeError, OSError):
            raise WireError(f"its {self.size} bytes do not fit in memory") from None
        return {name: content(tensor) for name, tensor in self.tensors.items()}


def read_file(content: bytes) -> TensorFile:
    """The file of these bytes.

    Raises:
        WireError: it is not laid out as it should be.
    """
    reader = Reader(len(content))
    reader.feed(content)
    return reader.finish()


def open_file(path: Path) -> TensorFile:
    """A file that is on the disk already, whose tensors are read from there when they are needed.

    Raises:
        WireError: it is not laid out as it should be.
    """
    whole = mapped(path)
    begin = 8 + int.from_bytes(content(whole[:8]), "little")
    head = bytes(content(whole[:begin]))
    metadata, specs = _read_head(head, len(whole))
    tensors = {
        name: whole[begin + first : begin + last].view(dtype).reshape(shape)
        for name, (dtype, shape, (first, last)) in specs.items()
    }
    return TensorFile(head, metadata, tensors)


def _cut(view: memoryview, most: int) -> Iterator[memoryview]:
    for begin in range(0, len(view), most):
        yield view[begin : begin + most]


_Entry = tuple[torch.dtype, tuple[int, ...], tuple[int, int]]
"""Dtype, shape and place of a tensor."""


def _read_head(head: bytes | bytearray, size: int) -> tuple[dict[str, str], dict[str, _Entry]]:
    """The metadata of a file of so many bytes, and its tensors in their order."""
    try:
        table = read_json(head[8:], MOST_HEAD)
        metadata = table.pop(METADATA)
        if not all(type(value) is str for value in metadata.values()):
            raise TypeError
        specs = {name: _spec(entry) for name, entry in table.items()}
    except (*JSON_ERRORS, AttributeError) as error:
        raise WireError(f"its head cannot be read ({type(error).__name__})") from None
    _check_places([places for _, _, places in specs.values()], size - len(head))
    return metadata, {name: specs[name] for name in sorted(specs, key=lambda name: specs[name][2])}


def _spec(entry: Any) -> _Entry:
    """Dtype, shape and place of a tensor, as a head says."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > 8 or not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)):
        raise ValueError
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError
    return dtype, shape, (begin, end)


def _check_places(places: list[tuple[int, int]], size: int) -> None:
    """Whether the tensors fill the file without a gap."""
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise WireError("its tensors do not follow on one another")
        at = end
    if at != size:
        raise WireError(f"its tensors have {at} bytes, of {size} announced")
