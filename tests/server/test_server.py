"""The server against hand-computed values and slow references."""

from __future__ import annotations

import math

import pytest
import torch

from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.messages import Reply
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import Streams
from fedstrata.server.server import Server, ServerOptimizer, WeightedMean, step
from fedstrata.wire.codec import WireError, quantize
from tiny import tiny_model


def test_mean_golden() -> None:
    weighted, uniform = WeightedMean(), WeightedMean()
    for value, examples in ((1.0, 1), (3.0, 3)):
        weighted.add({"w": torch.tensor([value])}, examples)
        uniform.add({"w": torch.tensor([value])}, 1)
    assert weighted.result()["w"].item() == 2.5
    assert uniform.result()["w"].item() == 2.0


def test_mean_of_one_is_exact_and_tensors_are_averaged_over_those_that_sent_them() -> None:
    value = torch.rand(1000)
    mean = WeightedMean()
    mean.add({"both": value, "first": value}, 7)
    mean.add({"both": value * 3}, 14)
    assert torch.equal(mean.result()["first"], value)
    torch.testing.assert_close(mean.result()["both"], value * 7 / 3)


def reference(name: str, old: float, deltas: list[float], eta: float, b1: float, b2: float, tau: float) -> float:
    """Reddi et al., Algorithm 2, on one number."""
    m, v = 0.0, tau**2
    for d in deltas:
        if name == "fedavgm":
            m = b1 * m + d
            old += eta * m
            continue
        m = b1 * m + (1 - b1) * d
        if name == "fedadam":
            v = b2 * v + (1 - b2) * d * d
        elif name == "fedyogi":
            v = v - (1 - b2) * d * d * (1 if v > d * d else -1 if v < d * d else 0)
        else:
            v = v + d * d
        old += eta * m / (math.sqrt(v) + tau)
    return old


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_rules_follow_their_papers(name: str) -> None:
    rule = ServerOptimizer(name, 0.1, 0.9, 0.99, 1e-3)
    old, memory = torch.tensor([0.5], dtype=torch.float64), {}
    deltas = [0.3, -0.2, 0.05]
    for delta in deltas:
        old = step(rule, old, old + delta, memory)
    b1 = 0.0 if name == "fedadagrad" else 0.9
    assert old.item() == pytest.approx(reference(name, 0.5, deltas, 0.1, b1, 0.99, 1e-3), rel=1e-12)


def test_fedavg_takes_the_mean_and_moves_part_of_the_way_at_a_smaller_rate() -> None:
    old, mean = torch.tensor([1.0]), torch.tensor([2.0])
    assert step(ServerOptimizer(), old, mean, {}) is mean
    assert step(ServerOptimizer(learning_rate=0.25), old, mean, {}).item() == 1.25


def server(dtype: str = "fp32") -> Server:
    model = tiny_model()
    parts = find_parts(model)
    return Server(parts, {part: part_tensors(model, parts, [part]) for part in parts.names}, dtype=dtype)


def answer(made: Server, plan: Plan, client: str, value: float, examples: int = 1) -> Reply:
    weights = {
        part: quantize(
            {name: torch.full(shape, value) for name, shape in made.parts.shapes[part].items()}, made.dtype
        )
        for part in plan.send
    }
    return Reply(client, examples, weights)


LAYER = Plan(layers=(0, 1), train=("layer.1", "head"), send=("layer.1", "head"))


def test_only_what_changed_is_sent_again() -> None:
    made = server()
    assert made.request(0, "a", LAYER).parts == {}, "the start model is there from the setup"
    made.collect(LAYER, answer(made, LAYER, "a", 1.0))
    assert made.merge() == ["layer.1", "head"]
    assert set(made.request(1, "a", LAYER).parts) == {"layer.1", "head"}
    assert made.request(1, "a", LAYER).parts == {}, "asked again in the same round, it has everything"
    shallow = Plan(layers=(0,), train=("layer.0",), send=("layer.0",))
    assert set(made.request(5, "late", shallow).parts) == {"head"}, "layer.1 is not built, so it can wait"
    assert set(made.request(6, "late", LAYER).parts) == {"layer.1"}


def test_an_untouched_part_stays_as_it_is() -> None:
    made = server()
    before = dict(made.weights)
    made.request(0, "a", LAYER)
    made.collect(LAYER, answer(made, LAYER, "a", 1.0))
    made.merge()
    for part in made.parts.names:
        assert (made.weights[part] is before[part]) == (part not in LAYER.send)
    assert made.weights["head"]["cls.predictions.bias"].eq(1).all()


def test_a_kept_part_is_never_sent() -> None:
    made = server()
    everything = Plan(layers=(0, 1, 2), train=made.parts.names, send=made.parts.names)
    made.collect(everything, answer(made, everything, "a", 1.0))
    made.merge()
    private = Plan(layers=(0, 1, 2), train=made.parts.names, send=("embeddings",), keep=("layer.2", "head"))
    request = made.request(1, "b", private)
    assert set(request.parts) == {"embeddings", "layer.0", "layer.1"}
    assert set(request.versions) == {"embeddings", "layer.0", "layer.1"}


def test_a_narrow_wire_rounds_what_is_received_and_not_the_start() -> None:
    made = server("fp16")
    third = 1 / 3
    assert made.received("layer.1") is made.weights["layer.1"]
    made.collect(LAYER, answer(made, LAYER, "a", third))
    made.collect(LAYER, answer(made, LAYER, "b", 1.0))
    made.merge()
    exact = (torch.tensor(third).half().double() + 1).div(2).float()
    value = made.weights["layer.1"]["bert.encoder.layer.1.output.dense.bias"]
    assert torch.equal(value, exact.expand_as(value)), "the sum at the server is not rounded to 16 bit"
    got = made.received("layer.1")["bert.encoder.layer.1.output.dense.bias"]
    assert torch.equal(got, value.half().float())
    assert made.outgoing("layer.1") is made.outgoing("layer.1"), "converted once"


def test_a_message_that_was_never_sent_leaves_nothing() -> None:
    made = server("int8")
    new = {name: torch.rand(shape) for name, shape in made.parts.shapes["head"].items()}
    made.replace("head", new)
    made.replace("head", new)
    assert made.rest == {}
    assert set(made.request(0, "a", LAYER).parts) == {"head"}
    made.replace("head", new)
    assert made.rest.keys() == {"head"}


def test_int8_adds_up_over_the_rounds() -> None:
    """All that clients were sent, and the rest, is all that the server had; each version is converted once."""
    made = server("int8")
    name = "bert.encoder.layer.1.output.dense.weight"
    had, got = (torch.zeros(32, 64) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for round in range(20):
        reply = answer(made, LAYER, "a", 1.0)
        value = {n: torch.randn(shape, generator=generator) for n, shape in made.parts.shapes["layer.1"].items()}
        reply.weights["layer.1"] = quantize(value, "int8")
        made.collect(LAYER, reply)
        made.collect(LAYER, answer(made, LAYER, "b", 0.3, examples=2))
        made.merge()
        rest = made.rest["layer.1"][name] if round else torch.zeros(())
        assert set(made.request(round, "a", LAYER).parts) == {"layer.1", "head"}
        assert torch.allclose(got + rest, had, atol=1e-4)
        got += made.received("layer.1")[name]
        had += made.weights["layer.1"][name]
        assert made.outgoing("layer.1") is made.outgoing("layer.1")
    assert (got - had).abs().max() > 1e-3
    assert made.rest.keys() == {"layer.1", "head"}


@pytest.mark.parametrize("fault", ["missing", "shape", "nan", "dtype"])
def test_a_bad_answer_is_refused_before_it_counts(fault: str) -> None:
    made = server()
    reply = answer(made, LAYER, "a", 1.0)
    head = reply.weights["head"]
    if fault == "missing":
        del reply.weights["head"]
    if fault == "shape":
        head["cls.predictions.bias"] = torch.zeros(1)
    if fault == "nan":
        head["cls.predictions.bias"][0] = math.nan
    if fault == "dtype":
        head["cls.predictions.bias"] = head["cls.predictions.bias"].double()
    with pytest.raises(WireError):
        made.collect(LAYER, reply)
    assert made.merge() == []


def test_selection_is_a_share_in_canonical_order_and_differs_between_rounds() -> None:
    names = [f"c{i}" for i in range(10)]
    rounds = [sample_clients(names, 0.3, round, Streams(0)) for round in range(20)]
    assert all(len(chosen) == 3 and chosen == sorted(chosen) for chosen in rounds)
    assert len({tuple(chosen) for chosen in rounds}) > 10
    assert sample_clients(names, 1.0, 0, Streams(0)) == names
    assert len(sample_clients(names, 0.01, 0, Streams(0))) == 1
    assert sample_clients(names, 0.3, 4, Streams(0)) == rounds[4]
