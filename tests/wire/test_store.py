"""Tensors on disk: whole or not at all, and a client's store round by round."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from fedstrata.wire.files import checksum_of, write_bytes
from fedstrata.wire.store import Store, read_tensors, write_tensors


def value(number: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), number)}


def number(tensors: dict[str, torch.Tensor]) -> float:
    return float(tensors["weight"][0, 0])


def test_write_bytes_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_bytes(path, b"one")
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert [item.name for item in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, crash)
        with pytest.raises(KeyboardInterrupt):
            write_bytes(path, b"new, and much longer")
    assert path.read_bytes() == b"old"
    write_bytes(path, b"new")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file", b"new")]


def test_the_content_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("fsync"), fsync(*a)))
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    write_bytes(tmp_path / "file", b"x")
    assert calls[:2] == ["fsync", "replace"]


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    made = {
        "fp32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
    }
    found = write_tensors(tmp_path / "x.safetensors", made)
    assert found == checksum_of(tmp_path / "x.safetensors")
    own = safetensors.torch.save({name: tensor.contiguous() for name, tensor in made.items()}, {"format": "pt"})
    assert (tmp_path / "x.safetensors").read_bytes() == own, "as safetensors writes it"
    back = read_tensors(tmp_path / "x.safetensors")
    assert back.keys() == made.keys()
    for name, tensor in made.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # what transformers asks for


def test_an_empty_store_holds_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path / "never made").load(5) == {}


def test_load_gives_the_last_round_before(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(0, value(0))
    store.save(3, value(3))
    assert store.load(0) == {}
    assert number(store.load(1)) == number(store.load(3)) == 0
    assert number(store.load(4)) == number(store.load(10**7)) == 3


def test_a_round_that_is_run_again_starts_from_the_same_tensors(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in range(5):
        store.save(round, value(round))
    assert number(Store(tmp_path).load(4)) == 3
    store.save(4, value(40))
    assert number(store.load(4)) == 3
    assert number(store.load(5)) == 40


def test_only_four_rounds_are_held(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in range(12):
        store.save(round, value(round))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000008.safetensors",
        "round-000009.safetensors",
        "round-000010.safetensors",
        "round-000011.safetensors",
    ]


def test_a_client_asked_now_and_then_keeps_its_last_round(tmp_path: Path) -> None:
    """With a fraction of the clients per round, rounds have gaps."""
    store = Store(tmp_path)
    for round in (2, 7, 9):
        store.save(round, value(round))
    assert number(store.load(9)) == 7
    assert number(store.load(20)) == 9


def test_a_save_that_breaks_off_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.save(0, value(0))
    store.save(1, value(1))

    def crash(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        store.save(2, value(2))
    assert number(store.load(2)) == number(store.load(3)) == 1
    assert number(store.load(1)) == 0
