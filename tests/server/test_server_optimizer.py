"""The server's optimizers against slow references on single numbers."""

from __future__ import annotations

import math

import pytest
import torch

from fedstrata.job.tables import Server as Table
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.server.optimizer import LEARNING_RATES, AdaptiveOptimizer, make_server_optimizer
from fedstrata.server.server import Server
from tiny import tiny_model

ADAPTIVE = ("adam", "yogi", "adagrad")


def reference(name: str, old: float, deltas: list[float], eta: float, b1: float, b2: float, tau: float) -> float:
    """Reddi et al., Algorithm 2, on one number."""
    m, v = 0.0, tau**2
    for d in deltas:
        if name == "momentum":
            m = b1 * m + d
            old += eta * m
            continue
        m = b1 * m + (1 - b1) * d
        if name == "adam":
            v = b2 * v + (1 - b2) * d * d
        elif name == "yogi":
            v = v - (1 - b2) * d * d * (1 if v > d * d else -1 if v < d * d else 0)
        else:
            v = v + d * d
        old += eta * m / (math.sqrt(v) + tau)
    return old


def stepped(optimizer: AdaptiveOptimizer, deltas: list[float]) -> float:
    """Where 0.5 is after one step for each delta between the weight and its aggregate."""
    old = torch.tensor([0.5], dtype=torch.float64)
    moments: dict[str, torch.Tensor] = {}
    for delta in deltas:
        old = optimizer.step(old, old + delta, moments)
    return old.item()


@pytest.mark.parametrize("name", ["momentum", *ADAPTIVE])
def test_optimizers_follow_their_papers(name: str) -> None:
    deltas = [0.3, -0.2, 0.05]
    b1 = 0.0 if name == "adagrad" else 0.9
    expected = reference(name, 0.5, deltas, 0.1, b1, 0.99, 1e-3)
    assert stepped(AdaptiveOptimizer(name, 0.1, 0.9, 0.99, 1e-3), deltas) == pytest.approx(expected, rel=1e-12)


def test_the_tables_numbers_are_the_optimizers() -> None:
    table = Table(optimizer="yogi", learning_rate=0.5, momentum=0.8, beta2=0.7, tau=0.1)
    assert make_server_optimizer(table) == AdaptiveOptimizer("yogi", 0.5, 0.8, 0.7, 0.1)


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_without_a_learning_rate_each_takes_its_own(name: str) -> None:
    rate = {"sgd": 1.0, "momentum": 1.0, "adagrad": 0.003}.get(name, 0.01)
    deltas = [0.3, -0.2]
    assert stepped(AdaptiveOptimizer(name), deltas) == stepped(AdaptiveOptimizer(name, rate), deltas)
    assert stepped(AdaptiveOptimizer(name), deltas) != stepped(AdaptiveOptimizer(name, rate / 2), deltas)


def test_sgd_takes_the_aggregate_and_moves_part_of_the_way_at_a_smaller_rate() -> None:
    old, aggregate = torch.tensor([1.0]), torch.tensor([2.0])
    moments: dict[str, torch.Tensor] = {}
    assert AdaptiveOptimizer().step(old, aggregate, moments) is aggregate
    assert AdaptiveOptimizer(learning_rate=1.0).step(old, aggregate, moments) is aggregate
    assert AdaptiveOptimizer(learning_rate=0.25).step(old, aggregate, moments).item() == 1.25
    assert moments == {}, "and remembers nothing"


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_server_keeps_the_moments_of_every_tensor_that_moved(name: str) -> None:
    model = tiny_model()
    parts = find_parts(model)
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    server = Server(parts, weights, optimizer=AdaptiveOptimizer(name, 0.1))
    old = {tensor: value.clone() for tensor, value in weights["layer.1"].items()}
    for value in (1.0, 2.0):
        server.aggregate.add({t: torch.full(shape, value) for t, shape in parts.shapes["layer.1"].items()}, 1, "a")
        server.merge()
    assert server.moments.keys() == parts.shapes["layer.1"].keys()
    assert all(set(moments) == {"first", "second"} for moments in server.moments.values())
    b1 = 0.0 if name == "adagrad" else 0.9
    for tensor, start in old.items():
        number = start.flatten()[0].item()
        first = reference(name, number, [1.0 - number], 0.1, b1, 0.99, 1e-3)
        expected = reference(name, number, [1.0 - number, 2.0 - first], 0.1, b1, 0.99, 1e-3)
        assert server.weights["layer.1"][tensor].flatten()[0].item() == pytest.approx(expected, rel=1e-4)
