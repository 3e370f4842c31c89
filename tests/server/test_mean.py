"""The weighted mean in blocks and passes, against sums of whole tensors, one reply after the other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.server import mean as module
from fedstrata.server.mean import CHUNK, HELD, WeightedMean


def reply(size: int, number: int) -> torch.Tensor:
    """Every other one is huge and taken back by the next such: what the others lose depends on their order."""
    generator = torch.Generator().manual_seed(number if number % 2 == 0 else -1)
    values = torch.randn(size, generator=generator)
    return values if number % 2 == 0 else values * (2.0**60 if number % 4 == 1 else -(2.0**60))


def plainly(values: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
    total = torch.zeros(values[0].shape, dtype=torch.float64)
    for value, weight in zip(values, weights, strict=True):
        total = total + weight * value.double()
    return (total / sum(weights)).float()


@pytest.mark.parametrize("clients", [1, 2, HELD - 1, HELD, HELD + 1, 2 * HELD, 2 * HELD + 3])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_blocks_and_passes_change_no_bit(size: int, clients: int) -> None:
    values, weights = [reply(size, i) for i in range(clients)], [5 if i % 2 else 3 + i for i in range(clients)]
    mean, before = WeightedMean(), [value.clone() for value in values]
    for i, (value, weight) in enumerate(zip(values, weights, strict=True)):
        mean.add({"w": value}, weight, str(i))
    assert torch.equal(mean.result()["w"], plainly(values, weights))
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))
    if clients in (4, 5, 8) and size > 1:
        assert not torch.equal(plainly(values[::-1], weights[::-1]), plainly(values, weights)), "order is seen"


def test_each_tensor_has_its_own_senders_and_its_shape() -> None:
    mean, sent = WeightedMean(), dict[str, list[int]]()
    shapes = {"a": (3, 5), "b": (2 * CHUNK + 1,), "c": (0, 4), "d": ()}
    for i in range(3 * HELD):
        own = {name: reply(7, i).sum().expand(shape).contiguous() for name, shape in shapes.items()}
        chosen = {name: tensor for k, (name, tensor) in enumerate(own.items()) if i % (k + 1) == 0}
        mean.add(chosen, i + 1, str(i))
        for name in chosen:
            sent.setdefault(name, []).append(i)
    for name, tensor in mean.result().items():
        values = [reply(7, i).sum().expand(shapes[name]) for i in sent[name]]
        assert tensor.shape == shapes[name]
        assert torch.equal(tensor, plainly(values, [i + 1 for i in sent[name]]))
    assert sorted(sent) == sorted(shapes)


def test_small_tensors_are_summed_together_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    together, sizes = module.add_up_together, list[list[int]]()

    def watched(waiting: list[module.Waiting], sums: list[torch.Tensor]) -> None:
        sizes.append([total.numel() for total in sums])
        together(waiting, sums)

    monkeypatch.setattr(module, "add_up_together", watched)
    shapes = {"a": (5,), "b": (2, CHUNK // 4), "c": (CHUNK,), "d": (), "e": (3, 7), "f": (CHUNK + 1,)}
    mean = WeightedMean()
    for i in range(HELD + 1):  # as a reply comes: part by part
        for k, (name, shape) in enumerate(shapes.items()):
            mean.add({name: reply(CHUNK + 1, i + 2 * k)[: torch.Size(shape).numel()].view(shape)}, i + 1, str(i))
    found = mean.result()
    for k, (name, shape) in enumerate(shapes.items()):
        values = [reply(CHUNK + 1, i + 2 * k)[: torch.Size(shape).numel()].view(shape) for i in range(HELD + 1)]
        assert torch.equal(found[name], plainly(values, list(range(1, HELD + 2)))), name
    assert sizes == [[5, CHUNK // 2, CHUNK], [1, 21]], "one pass of all, in groups; the large one is apart"


@pytest.mark.parametrize("clients", [1, HELD + 1])
def test_a_zero_has_the_sign_of_a_sum(clients: int) -> None:
    mean = WeightedMean()
    for i in range(clients):
        mean.add({"w": torch.tensor([-0.0])}, 2, str(i))
    assert not mean.result()["w"].signbit().any()


def test_of_any_number_of_replies_few_wait() -> None:
    mean = WeightedMean()
    for i in range(100):
        mean.add({"w": torch.full((10,), float(i))}, 1, str(i))
        assert len(mean.waiting["w"]) == i % HELD + 1
        assert mean.bytes == 40 * len(mean.waiting["w"])
    assert {name: tensor.numel() for name, tensor in mean.sums.items()} == {"w": 10}
    assert mean.result()["w"].tolist() == [49.5] * 10
    assert (mean.waiting, mean.sums) == ({}, {}), "they are dropped as the result is made"


def test_large_replies_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 100)
    mean, waited = WeightedMean(), list[int]()
    for i in range(6):
        mean.add({"v": torch.full((9,), float(i)), "w": torch.full((2,), float(i))}, 1, str(i))
        waited.append(mean.bytes)
    assert waited == [44, 88, 132, 44, 88, 132]
    found: Tensors = mean.result()
    assert (found["v"].tolist(), found["w"].tolist()) == ([2.5] * 9, [2.5] * 2)


def test_at_most_one_pass_runs_and_its_error_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    started, gate, begun, add_up = threading.Event(), threading.Event(), list[int](), module.add_up

    def slow(waiting: module.Waiting, *rest: Any) -> None:
        begun.append(len(waiting))
        started.set()
        gate.wait(30)
        add_up(waiting, *rest)

    monkeypatch.setattr(module, "add_up", slow)
    mean = WeightedMean()
    for i in range(2 * HELD):
        mean.add({"w": torch.ones(CHUNK + 1)}, 1, str(i))
    other = threading.Thread(target=mean.add, args=({"w": torch.ones(CHUNK + 1)}, 1, "late"))
    other.start()  # it waits for the pass before it
    assert started.wait(30)
    assert (len(mean.waiting["w"]), begun) == (HELD, [HELD])
    gate.set()
    other.join(30)
    assert mean.result()["w"].unique().item() == 1.0
    assert mean.thread is None

    def full(*rest: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "add_up", full)
    for i in range(HELD + 1):
        mean.add({"w": torch.ones(CHUNK + 1)}, 1, str(i))
    with pytest.raises(MemoryError):
        mean.result()
