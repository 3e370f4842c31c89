"""Tensors that wait on the disk: what they hold, and what they take in memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from fedstrata.server.mean import WeightedMean
from fedstrata.wire import on_disk as module
from fedstrata.wire.codec import WireError
from fedstrata.wire.on_disk import is_on_disk, let_go, on_disk
from fedstrata.wire.states import check, wire_spec
from fedstrata.wire.tensor_file import Reader, TensorFile, open_file, pack
from tiny import resident

LARGE = torch.arange(3_000_000, dtype=torch.float32)
MOST = 5000
"""Kilobytes that stay of a file at most: the system reads a little ahead of what is looked at."""
TENSORS = {
    "small": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "large": LARGE.reshape(3, -1),
    "bytes": torch.arange(5, dtype=torch.uint8),
}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one
    )


def received(file: TensorFile, folder: Path | None, size: int = 1 << 20) -> TensorFile:
    content, reader = bytes(file), Reader(len(file), folder=folder)
    for begin in range(0, len(content), size):
        reader.feed(content[begin : begin + size])
    return reader.finish()


def test_a_copy_waits_on_the_disk_and_leaves_nothing_there(tmp_path: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    own = dict(TENSORS)
    copied = on_disk({"part": own, "none": {}}, tmp_path)
    assert (list(copied), list(copied["part"])) == (["part", "none"], list(own))
    assert equal(copied["part"], own)
    assert all(is_on_disk(tensor) for tensor in copied["part"].values() if tensor.numel())
    assert not any(map(is_on_disk, own.values()))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == files + 1
    del copied
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_small_copy_is_in_memory(tmp_path: Path) -> None:
    own = {"w": torch.ones(3)}
    copied = on_disk({"part": own}, tmp_path)
    assert not is_on_disk(copied["part"]["w"])
    own["w"].zero_()
    assert copied["part"]["w"].tolist() == [1, 1, 1]


def test_what_is_let_go_takes_no_memory_and_is_still_there(tmp_path: Path) -> None:
    copied = on_disk({"part": TENSORS}, tmp_path)["part"]
    large = copied["large"]
    assert resident(large) == 0, "it was written, not looked at"
    assert float(large.sum()) > 0
    assert resident(large) >= large.nbytes // 1024
    let_go(copied.values())
    assert resident(large) < MOST
    assert equal(copied, TENSORS)


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_a_large_file_that_is_received_waits_on_the_disk(tmp_path: Path, size: int) -> None:
    file = received(pack(TENSORS, {"kind": "thing"}), tmp_path, size)
    assert file.metadata == {"kind": "thing"}
    assert resident(file.tensors["large"]) == 0
    check(file.tensors, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()})
    assert resident(file.tensors["large"]) < MOST, "it was checked, and let go"
    assert equal(file.tensors, TENSORS)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in file.tensors.values())
    let_go(file.tensors.values())
    assert sum(map(len, file.pieces())) == len(file)
    assert resident(file.tensors["large"]) < MOST, "it was sent on, and let go"


def test_a_small_file_is_in_memory(tmp_path: Path) -> None:
    file = received(pack({"w": torch.ones(3)}, {}), tmp_path)
    assert not is_on_disk(file.tensors["w"])


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="do not fit in memory"):
        received(pack(TENSORS, {}), tmp_path / "none")


def test_a_file_that_is_there_is_read_when_it_is_needed(tmp_path: Path) -> None:
    path, file = tmp_path / "file", pack(TENSORS, {"kind": "thing"})
    path.write_bytes(bytes(file))
    opened = open_file(path)
    assert resident(opened.tensors["large"]) < MOST
    assert equal(opened.tensors, TENSORS)
    assert (bytes(opened), opened.metadata) == (bytes(file), {"kind": "thing"})
    path.write_bytes(bytes(file)[:-1])
    with pytest.raises(WireError, match="its tensors have 12000031 bytes, of 12000030 announced"):
        open_file(path)


@pytest.mark.parametrize("clients", [2, 5])
def test_replies_on_the_disk_are_summed_to_the_same_bits_one_tensor_at_a_time(
    tmp_path: Path, clients: int
) -> None:
    replies = [{f"{i}": torch.randn(1_000_000) for i in range(4)} for _ in range(clients)]
    gc.collect()
    before, mean, other = len(module._maps), WeightedMean(), WeightedMean()
    for number, reply in enumerate(replies):
        waits = on_disk({"part": reply}, tmp_path)["part"]
        check(waits, wire_spec(dict.fromkeys(reply, (1_000_000,)), "fp32"))
        mean.add(waits, number + 1, str(number))
        other.add(reply, number + 1, str(number))
        last = waits["3"]
    del waits
    assert mean.bytes == 0
    seen: list[int] = []
    made = mean._mean

    def watched(name: str) -> torch.Tensor:
        seen.append(resident(last))
        return made(name)

    mean._mean = watched  # type: ignore[method-assign]
    assert equal(mean.result(), other.result())
    assert (mean.waiting, mean.sums) == ({}, {})
    assert max(seen) < MOST
    assert resident(last) < MOST
    gc.collect()
    assert len(module._maps) == before + 1, "the others are gone"
