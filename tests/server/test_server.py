"""The server: who is sent what, and how replies become the next version of a part."""

from __future__ import annotations

import math

import pytest
import torch

from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.messages import Reply
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import Streams
from fedstrata.server.optimizer import LEARNING_RATES, AdaptiveOptimizer
from fedstrata.server.server import Server
from fedstrata.wire.codec import Wire, WireError, make_codec, quantize
from tiny import tiny_model


def server(dtype: str = "fp32") -> Server:
    model = tiny_model()
    parts = find_parts(model)
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    return Server(parts, weights, Wire(make_codec(dtype)))


def answer(made: Server, plan: Plan, client: str, value: float, examples: int = 1) -> Reply:
    def filled(part: str) -> dict[str, torch.Tensor]:
        return {name: torch.full(shape, value) for name, shape in made.parts.shapes[part].items()}

    weights = {part: quantize(filled(part), made.wire.codec.name) for part in plan.send}
    return Reply(client, examples, weights)


LAYER = Plan(layers=(0, 1), train=("layer.1", "head"), send=("layer.1", "head"))


def test_only_what_changed_is_sent_again() -> None:
    made = server()
    assert made.request(0, "a", LAYER).parts == {}, "the start model is there from the setup"
    made.accumulate(LAYER, answer(made, LAYER, "a", 1.0), {})
    assert made.merge() == ["layer.1", "head"]
    assert set(made.request(1, "a", LAYER).parts) == {"layer.1", "head"}
    assert made.request(1, "a", LAYER).parts == {}, "asked again in the same round, it has everything"
    shallow = Plan(layers=(0,), train=("layer.0",), send=("layer.0",))
    assert set(made.request(5, "late", shallow).parts) == {"head"}, "layer.1 is not built, so it can wait"
    assert set(made.request(6, "late", LAYER).parts) == {"layer.1"}


def test_a_change_is_shortened_against_what_its_round_began_with() -> None:
    made, head = server(), Plan(layers=(0, 1, 2), train=("head",), send=("head",))
    made.max_norm = 1.0
    for value in (1.0, 2.0):
        old = {name: tensor.clone() for name, tensor in made.weights["head"].items()}
        made.accumulate(head, answer(made, head, "a", value), {})
        made.merge()
        moved = [made.weights["head"][name].double() - old[name].double() for name in old]
        assert math.sqrt(sum(float(change.square().sum()) for change in moved)) == pytest.approx(1.0, rel=1e-4)


def test_what_a_narrow_wire_does_not_round_arrives_as_it_was_sent() -> None:
    made, head = server("bf16"), Plan(layers=(0, 1, 2), train=("head",), send=("head",))
    made.weights["head"] = {name: torch.full_like(old, 256.0) for name, old in made.weights["head"].items()}
    made.accumulate(head, answer(made, head, "a", 0.001), {})
    made.merge()
    sent = torch.tensor(0.001).bfloat16().float()
    assert all(tensor.eq(sent).all() for tensor in made.weights["head"].values()), "256 + (0.001 - 256) is another"


def test_an_untouched_part_stays_as_it_is() -> None:
    made = server()
    before = dict(made.weights)
    made.request(0, "a", LAYER)
    made.accumulate(LAYER, answer(made, LAYER, "a", 1.0), {})
    made.merge()
    for part in made.parts.names:
        assert (made.weights[part] is before[part]) == (part not in LAYER.send)
    assert made.weights["head"]["cls.predictions.bias"].eq(1).all()


def test_a_kept_part_is_never_sent() -> None:
    made = server()
    everything = Plan(layers=(0, 1, 2), train=made.parts.names, send=made.parts.names)
    made.accumulate(everything, answer(made, everything, "a", 1.0), {})
    made.merge()
    private = Plan(layers=(0, 1, 2), train=made.parts.names, send=("embeddings",), keep=("layer.2", "head"))
    request = made.request(1, "b", private)
    assert set(request.parts) == {"embeddings", "layer.0", "layer.1"}
    assert set(request.versions) == {"embeddings", "layer.0", "layer.1"}


def test_a_narrow_wire_rounds_what_is_received_and_not_the_start() -> None:
    made = server("fp16")
    third = 1 / 3
    assert made.received("layer.1") is made.weights["layer.1"]
    made.accumulate(LAYER, answer(made, LAYER, "a", third), {})
    made.accumulate(LAYER, answer(made, LAYER, "b", 1.0), {})
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
    assert made.residual == {}
    assert set(made.request(0, "a", LAYER).parts) == {"head"}
    made.replace("head", new)
    assert made.residual.keys() == {"head"}


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
        made.accumulate(LAYER, reply, {})
        made.accumulate(LAYER, answer(made, LAYER, "b", 0.3, examples=2), {})
        made.merge()
        residual = made.residual["layer.1"][name] if round else torch.zeros(())
        assert set(made.request(round, "a", LAYER).parts) == {"layer.1", "head"}
        assert torch.allclose(got + residual, had, atol=1e-4)
        got += made.received("layer.1")[name]
        had += made.weights["layer.1"][name]
        assert made.outgoing("layer.1") is made.outgoing("layer.1")
    assert (got - had).abs().max() > 1e-3
    assert made.residual.keys() == {"layer.1", "head"}


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_weights_stay_where_clients_learn_nothing(dtype: str, optimizer: str) -> None:
    """Two clients send back what they received, one of them not in every round: not a bit of the server moves."""
    made = server(dtype)
    made.optimizer = AdaptiveOptimizer(optimizer)
    before = {part: {name: t.clone() for name, t in own.items()} for part, own in made.weights.items()}
    left: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}}
    for round in range(6):
        for client in ("a", "b") if round % 2 else ("a",):
            made.request(round, client, LAYER)
            weights = {}
            for part in LAYER.send:
                got = made.received(part)
                reference = got if made.wire.changes else None
                weights[part], rest = made.wire.encode(got, reference, left[client])
                left[client].update(rest)
            made.accumulate(LAYER, Reply(client, 3, weights), {})
        made.merge()
    for part, own in before.items():
        assert all(torch.equal(made.weights[part][name], own[name]) for name in own), part
    assert made.versions["head"] == 6


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_the_change_is_taken_against_what_was_received_and_added_to_the_exact_weights(dtype: str) -> None:
    made = server(dtype)
    name = "bert.encoder.layer.1.output.dense.weight"
    exact = made.weights["layer.1"][name].clone()
    for round in range(3):
        made.request(round, "a", LAYER)
        reply = answer(made, LAYER, "a", 0.0)
        got = made.received("layer.1")
        learned = {n: t + 0.125 for n, t in got.items()}
        reply.weights["layer.1"], _ = made.wire.encode(learned, got if made.wire.changes else None)
        made.accumulate(LAYER, reply, {})
        made.merge()
        exact += 0.125
        steps = (made.weights["layer.1"][name] - exact).abs().max()
        assert steps < {"fp16": 1e-3, "bf16": 8e-3, "int8": 1e-4}[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_copies_of_layers_at_the_server_are_merged_as_replies_are_and_never_rounded(dtype: str) -> None:
    """They weigh as their clients do and move by the same optimizer, but have crossed no wire."""
    made, plan = server(dtype), Plan((0, 1, 2), ("head",), ("head",), server=("layer.1",))
    made.optimizer = AdaptiveOptimizer("sgd", learning_rate=0.5)
    before = made.weights["layer.1"]
    for client, learned, examples in (("a", 1.0, 3), ("b", 2.0, 1)):
        made.request(0, client, plan)
        copy = {name: tensor + learned for name, tensor in before.items()}
        made.accumulate(plan, answer(made, plan, client, learned, examples), {"layer.1": copy})
    made.merge()
    for name, tensor in made.weights["layer.1"].items():
        assert torch.allclose(tensor, before[name] + 0.5 * 1.25, rtol=0, atol=1e-6), name


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
        made.accumulate(LAYER, reply, {})
    assert made.merge() == []


def test_selection_is_a_share_in_canonical_order_and_differs_between_rounds() -> None:
    names = [f"c{i}" for i in range(10)]
    rounds = [sample_clients(names, 0.3, round, Streams(0)) for round in range(20)]
    assert all(len(chosen) == 3 and chosen == sorted(chosen) for chosen in rounds)
    assert len({tuple(chosen) for chosen in rounds}) > 10
    assert sample_clients(names, 1.0, 0, Streams(0)) == names
    assert len(sample_clients(names, 0.01, 0, Streams(0))) == 1
    assert sample_clients(names, 0.3, 4, Streams(0)) == rounds[4]
    assert len(sample_clients(names, 0.25, 0, Streams(0))) == 3, "2.5 is rounded up"


def test_a_commit_hears_of_the_clients_that_moved_alone_and_what_they_hold_is_held_once() -> None:
    made = server()
    for client in "abc":
        made.request(0, client, LAYER)
    assert made.take_moved().keys() == {"a", "b", "c"}
    made.accumulate(LAYER, answer(made, LAYER, "a", 1.0), {})
    made.merge()
    made.request(1, "b", LAYER)
    made.request(1, "c", LAYER)
    moved = made.take_moved()
    assert moved.keys() == {"b", "c"}
    assert moved["b"] is moved["c"]
    assert dict(zip(made.parts.names, moved["b"], strict=True))["layer.1"] == 1
    made.request(1, "c", LAYER)
    assert made.take_moved() == {}, "it has everything"
    made.forget("c")
    assert set(made.take_moved()["c"]) == {0}
