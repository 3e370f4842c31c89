"""Adapters: whatever a plan trains, sends or keeps of a layer is its adapter, and no method has a line for it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.client.answer import ClientData, Work, answer_request
from fedstrata.client.trainer import drain
from fedstrata.errors import UserError
from fedstrata.exchanges import EXCHANGES
from fedstrata.methods import METHODS
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import Reply
from fedstrata.plan.parts import Part, Parts
from fedstrata.plan.plan import Method, Plan, make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server.server import Server
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire.store import Store
from roles import make_runtime, sentences, weights_of
from tiny import tiny_model, tokenizer

DEPTH, WIDTH = 4, 2


def adapter_part(depth: int) -> Part:
    name = f"bert.encoder.layer.{depth}.output.adapter"
    shapes = {f"{name}.down.weight": (WIDTH, 32), f"{name}.up.weight": (32, WIDTH)}
    return Part(f"adapter.{depth}", "adapter", depth, shapes)


def with_adapters(parts: Parts) -> Parts:
    """The parts with an adapter beside every layer."""
    each: list[Part] = []
    for part in parts.each:
        each += [part, adapter_part(part.depth)] if part.depth is not None else [part]
    return replace(parts, each=tuple(each))


@pytest.fixture(scope="module", params=["mlm", "classify"])
def kind_and_parts(request: pytest.FixtureRequest) -> tuple[str, Parts]:
    return request.param, find_parts(tiny_model(head=request.param, layers=DEPTH))


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Every method as it is, with each word of each of its options, and with layers at the ends of a cut."""
    made: list[tuple[str, dict[str, Any]]] = []
    for name, method in METHODS.items():
        made.append((name, {}))
        for option, field in method.model_fields.items():
            words = [field.annotation, *get_args(field.annotation)]
            literals = [word for word in words if get_origin(word) is Literal]
            made += [(name, {option: value}) for literal in literals for value in get_args(literal)]
            if field.annotation is bool:
                made += [(name, {option: value}) for value in (False, True)]
    made += [("fedbert", {"lower": 1, "upper": 1}), ("fedsplitbert", {"critical_layer": DEPTH})]
    return [*made, ("fedsplitbert", {"critical_layer": 0}), ("fedbfpt", {"layers_per_round": 2})]


def adapted(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.replace("layer.", "adapter.") for name in names if name != "embeddings")


@pytest.mark.parametrize(("name", "options"), variants(), ids=str)
def test_every_method_plans_adapters(
    name: str, options: dict[str, Any], kind_and_parts: tuple[str, Parts]
) -> None:
    kind, plain = kind_and_parts
    parts, streams = with_adapters(plain), Streams(0)
    method = METHODS[name](**options)
    for round, client in itertools.product(range(method.rounds), "ab"):
        where = (kind, round, client, streams)
        if refusal := refused(method, plain, *where):
            assert refused(method, parts, *where) == refusal, "of a task or model that it is not for"
            continue
        expected, plan = method.plan(plain, *where), make_plan(method, parts, *where)
        plan.check(parts)
        assert plan.layers == expected.layers
        assert plan.server == expected.server
        assert plan.freeze_encoder == expected.freeze_encoder
        for field in ("train", "send", "keep"):
            names = getattr(plan, field)
            assert names == adapted(getattr(expected, field))
            assert not {parts[part].kind for part in names} & {"layer", "embeddings"}
        assert make_plan(method, plain, *where) == expected, "without adapters nothing changes"


def refused(method: Method, parts: Parts, *where: Any) -> str:
    """The sentence in which the method refuses to plan; empty where it does not."""
    try:
        make_plan(method, parts, *where)
    except UserError as error:
        return str(error)
    return ""


def test_the_variants_are_there() -> None:
    """The list above reads them off the fields; should it find none, the tests would hold for nothing."""
    found = {(name, *item) for name, options in variants() for item in options.items()}
    assert {("fedbt", "variant", "map"), ("fedbfpt", "variant", "s"), ("fedbert", "mode", "emb-avg")} <= found
    assert {("fedsplitbert", "embeddings", "local"), ("fedfreezebert", "variant", "centralized")} <= found
    assert {("fedbt", "pooler", "train"), ("fedbfpt", "legacy_rng", True)} <= found


def test_an_adapter_without_depth_stands_for_the_embeddings() -> None:
    plain = find_parts(tiny_model())
    parts = with_adapters(plain)
    prompt = Part("prompt", "adapter", None, {"prompt": (5, 32)})
    parts = replace(parts, each=(prompt, *parts.each))
    plan = make_plan(METHODS["fedavg"](), parts, "mlm", 0, "a", Streams(0))
    assert plan.train == plan.send == ("prompt", "adapter.0", "adapter.1", "adapter.2", "head")
    plan.check(parts)


def test_an_adapter_is_of_the_local_model_where_its_layer_is() -> None:
    parts = with_adapters(find_parts(tiny_model()))
    assert Plan((0, 2), ()).builds(parts) == ("embeddings", "layer.0", "adapter.0", "layer.2", "adapter.2", "head")
    assert parts.depth == 3
    with pytest.raises(ValueError, match=r"'adapter\.1' is not built"):
        Plan((0, 2), ("adapter.1",)).check(parts)
    with pytest.raises(ValueError, match=r"layers \[2\] stand in the local model more than once"):
        Plan((0, 2, 2), ("adapter.2",)).check(parts)
    with pytest.raises(ValueError, match=r"'adapter\.0'\] of the encoder are trained"):
        Plan((0, 1, 2), ("adapter.0",), freeze_encoder=True).check(parts)


class Adapter(nn.Module):
    """A bottleneck beside a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(32, WIDTH, bias=False), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.up(torch.relu(self.down(hidden)))  # type: ignore[no-any-return]


def adapter_model() -> tuple[Any, Parts]:
    """A tiny BERT with an adapter in every layer, and its parts."""
    model = tiny_model()
    parts = with_adapters(find_parts(model))
    torch.manual_seed(0)
    for layer in model.bert.encoder.layer:
        layer.output.adapter = Adapter()
        layer.output.register_forward_hook(lambda module, inputs, out: module.adapter(out))
    listed = {name: shape for shapes in parts.shapes.values() for name, shape in shapes.items()}
    assert listed == {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, parts


class Layers(Method):
    """Trains and sends the layers and nothing else."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        return Plan(tuple(range(parts.depth)), parts.layers(0), parts.layers(0))


@pytest.mark.parametrize(
    ("method", "trained"),
    [
        (Layers(), ("adapter.0", "adapter.1", "adapter.2")),
        (FedBFPT(), ("adapter.0", "head")),
        (METHODS["fedavg"](), ("adapter.0", "adapter.1", "adapter.2", "head")),
    ],
)
def test_a_round_trains_and_sends_exactly_the_adapters(
    method: Method, trained: tuple[str, ...], tmp_path: Path
) -> None:
    """From the server's request to the server's next version."""
    model, parts = adapter_model()
    task = masked_lm(tokenizer(), len(tokenizer()), 0.15, False)
    runtime = make_runtime(model, task, parts=parts, batch_size=4, learning_rate=1e-2)
    server = Server(parts, weights_of(runtime.working))
    start = {name: tensor for tensors in server.weights.values() for name, tensor in tensors.items()}
    plan = make_plan(method, parts, "mlm", 0, "a", Streams(0))
    shared = {part: (0, tensors) for part, tensors in server.weights.items()}
    data = ClientData(sentences(), np.arange(12), sentences(), {}, Store(tmp_path))
    work = Work(runtime, server.request(0, "a", plan), shared, data, lambda *_: None)
    reply: Reply = drain(answer_request(work, EXCHANGES["weights"].handlers))
    own = {name for part in trained for name in parts.shapes[part]}
    assert {name for name, p in model.named_parameters() if not torch.equal(p, start[name])} == own
    assert {name for name, p in model.named_parameters() if p.requires_grad} == own
    assert tuple(reply.weights) == trained
    server.accumulate(plan, reply, {})
    assert sorted(server.merge()) == sorted(trained)
    for part in trained:
        for name, tensor in server.weights[part].items():
            assert torch.equal(tensor, model.get_parameter(name))
    assert set(server.request(1, "b", plan).parts) == {part for part in trained if part in plan.builds(parts)}
