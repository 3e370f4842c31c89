"""Files that come in pieces: what they hold, and what a hostile sender can make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from fedstrata.wire import tensor_file
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import Reader, TensorFile, pack, read_file

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "rows": torch.arange(12, dtype=torch.int8).reshape(3, 4).T,
    "words": torch.arange(5, dtype=torch.int32),
}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one
    )


def read(content: bytes, size: int) -> TensorFile:
    reader = Reader(len(content))
    for begin in range(0, len(content), size):
        reader.feed(content[begin : begin + size])
    return reader.finish()


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_a_file_is_a_safetensors_file_however_it_is_cut(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", size)
    file = pack(TENSORS, {"kind": "thing"})
    content = bytes(file)
    assert len(content) == len(file)
    assert max(map(len, file.pieces())) <= size
    assert equal(load(content), TENSORS)
    back = read(content, size)
    assert equal(back.tensors, TENSORS)
    assert back.metadata == {"kind": "thing"}
    theirs = read(save({name: tensor.contiguous() for name, tensor in TENSORS.items()}, {"kind": "thing"}), size)
    assert equal(theirs.tensors, TENSORS)


def test_what_is_read_is_aligned_as_torch_aligns_it() -> None:
    """With other alignment a matrix product may differ in the last bit."""
    back = read(bytes(pack({"a": torch.ones(3), "b": torch.ones(5, 5)}, {})), 1)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in back.tensors.values())


def crafted(table: Any, body: bytes = bytes(16)) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + body


def one(**fields: Any) -> dict[str, Any]:
    return {"__metadata__": {}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}


BAD = [
    crafted(one(dtype="F31")),
    crafted(one(shape=[5])),
    crafted(one(shape=[-4])),
    crafted(one(shape=[True, 4])),
    crafted(one(shape=[2**62, 0, 4], data_offsets=[0, 0])),
    crafted(one(shape=[1] * 9 + [4])),
    crafted(one(data_offsets=[0, 2**70])),
    crafted(one(data_offsets=[-16, 0])),
    crafted(one(data_offsets=[0])),
    crafted({**one(), "b": one()["a"]}),
    crafted(one(), bytes(17)),
    crafted(one(), bytes(15)),
    crafted({"a": one()["a"]}),
    crafted({**one(), "__metadata__": {"kind": 1}}),
    crafted({**one(), "__metadata__": [1]}),
    crafted(b"[" * 100_000),
    crafted(b'{"__metadata__": {}, "a": ' + b"9" * 5000 + b"}"),
    crafted(b"\xff\xfe"),
    crafted([]),
    (2**63).to_bytes(8, "little") + bytes(100),
    b"short",
    b"",
]


@pytest.mark.parametrize("content", BAD)
def test_a_file_that_is_none_is_refused_before_anything_is_allocated(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("allocated")

    assert read_file(crafted(one())).tensors["a"].shape == (4,)
    monkeypatch.setattr(torch, "empty", none)
    with pytest.raises(WireError):
        read_file(content)


def test_what_is_not_admitted_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(metadata: Any, size: int) -> None:
        raise WireError(f"{metadata['kind']} of {size}")

    monkeypatch.delattr(torch, "empty")
    content = bytes(pack(TENSORS, {"kind": "thing"}))
    with pytest.raises(WireError, match="thing of 58"):
        Reader(len(content), admit).feed(content)
