"""What a notebook has set of torch before a run: the run's numbers are as in a fresh process, and it stays set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.client import trainer
from tiny import saved_models

Job = Callable[..., dict[str, Any]]


def state() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        nesting(),
    )


def nesting() -> int:
    inside = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return inside


@contextmanager
def numbers(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def products(precision: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SET: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "numbers of 64 bits": lambda: numbers(torch.float64),
    "numbers of 16 bits": lambda: numbers(torch.bfloat16),
    "rougher products": lambda: products("medium"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("before", SET.values(), ids=SET)
def test_a_run_comes_to_the_same_bits(job: Job, tmp_path: Path, before: Callable[[], Any]) -> None:
    small = job("fedavg", "classify", clients={"count": 2}, method={"rounds": 1})
    with before():
        was = state()
        found = fedstrata.run(small, {"output.dir": str(tmp_path / "found")})
        costs = fedstrata.forecast(small)
        assert state() == was
    fresh = fedstrata.run(small, {"output.dir": str(tmp_path / "fresh")})
    expected = saved_models(fresh.folder)
    assert {name: tensor.dtype for name, tensor in saved_models(found.folder).items()} == dict.fromkeys(
        expected, torch.float32
    )
    assert all(tensor.equal(expected[name]) for name, tensor in saved_models(found.folder).items())
    assert costs == fedstrata.forecast(small)


@pytest.mark.parametrize("enabled", [True, False])
def test_weights_in_16_bits_are_those_of_the_step(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    """Inside another autocast one does not forget its copies of weights, so every step would have the first's."""
    monkeypatch.setattr(trainer, "trained_in_bf16", lambda *_: nullcontext([]))
    small = job("fedavg", "classify", train={"precision": "bf16", "learning_rate": 1e-2}, method={"rounds": 1})
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        found = fedstrata.run(small, {"output.dir": str(tmp_path / "found")})
        assert nesting() == 1
    fresh = fedstrata.run(small, {"output.dir": str(tmp_path / "fresh")})
    expected = saved_models(fresh.folder)
    assert all(tensor.equal(expected[name]) for name, tensor in saved_models(found.folder).items())
