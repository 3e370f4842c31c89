"""Messages, and a client in a place of its own that checks them."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from fedstrata.client.answer import ClientData
from fedstrata.data.tokens import Tokens
from fedstrata.exchanges import EXCHANGES
from fedstrata.methods.fedbert import FedBERT
from fedstrata.methods.fedfreezebert import FedFreezeBERT
from fedstrata.methods.fedsplitbert import FedSplitBERT
from fedstrata.models.parts import find_parts
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import Streams
from fedstrata.sites.messages import (
    KINDS,
    decode_message,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from fedstrata.sites.own_model import save_own_model
from fedstrata.sites.site import Site
from fedstrata.tasks import Examples
from fedstrata.tasks.classify import Classify
from fedstrata.wire.codec import WireError, payload_bytes
from fedstrata.wire.store import Store, read_tensors
from fedstrata.wire.tensor_file import TensorFile
from roles import make_runtime
from tiny import tiny_model


def head(weight: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    return {"head": {"classifier.weight": weight, "classifier.bias": torch.zeros(3)}}


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "round": 3,
        "client": "a",
        "plan": Plan((0, 2), ("layer.2", "head"), ("head",), ("layer.2",)),
        "phase": "train",
        "versions": {"embeddings": 0, "layer.0": 0, "pooler": 0, "head": 1},
        "parts": head(torch.ones(3, 32)),
        "first": True,
        "span": (3 / 5, 4 / 5),
    }
    return Request(**{**fields, **changes})


RUN = "0" * 32


def asked(message: bytes | TensorFile) -> Request:
    return decode_request(decode_message(message, "request"))


def replied(message: bytes | TensorFile) -> Reply:
    return decode_reply(decode_message(message, "reply"))


def test_a_request_and_a_reply_come_back_as_they_were() -> None:
    sent = request()
    back = asked(encode_request(RUN, sent))
    assert {**vars(back), "parts": None} == {**vars(sent), "parts": None}
    assert torch.equal(back.parts["head"]["classifier.weight"], torch.ones(3, 32))
    weights = {"head": {"w": torch.ones(2, dtype=torch.bfloat16)}, "embeddings": {"v": torch.zeros(9)}}
    reply = Reply("a", 7, weights, 0.1, 3, Positions(4, 5, 6), 9, 0.25)
    again = replied(encode_reply(RUN, reply, request(), "start"))
    assert {**vars(again), "weights": None} == {**vars(reply), "weights": None}
    assert again.weights["head"]["w"].dtype == torch.bfloat16
    assert list(again.weights) == ["head", "embeddings"]
    nothing = replied(encode_reply(RUN, Reply("a", 7, scores={"a": {"loss": 1.5}}), request(), "start"))
    assert nothing.scores == {"a": {"loss": 1.5}}
    assert nothing.weights == {}
    assert nothing.loss != nothing.loss


@pytest.mark.parametrize(
    "message", [b"", b"nonsense", b"\xff" * 40, bytes(encode_reply(RUN, Reply("a", 1), request(), "start"))[:-3]]
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(WireError, match=f"not a {kind}: "):
            decode_message(message, kind)


def test_a_reply_is_no_request() -> None:
    with pytest.raises(WireError, match="not a request: is a reply"):
        decode_message(encode_reply(RUN, Reply("a", 1), request(), "start"), "request")


REQUEST = {
    "round": -1,
    "client": "a",
    "plan": {
        "layers": [0, 2],
        "train": ["head"],
        "send": ["head"],
        "keep": ["layer.2"],
        "freeze_encoder": False,
        "server": [],
        "between": [],
    },
    "phase": "receive",
    "versions": {"head": 0},
    "first": True,
    "span": [0.0, 1.0],
}
REPLY = {
    "client": "a",
    "examples": 1,
    "loss": 0.5,
    "steps": 0,
    "work": {"tokens": 0, "pairs": 0, "predicted": 0},
    "flops": 0,
    "seconds": 0.0,
    "scores": {"a": {"loss": 1.5}},
}
LONG = "a" * 201
INVALID = [
    ("request", REQUEST, ("round",), [-2, 0.5, None]),
    ("request", REQUEST, ("client",), ["", LONG, 1]),
    ("request", REQUEST, ("plan",), [None, {}]),
    ("request", REQUEST, ("plan", "layers"), [[-1], ["x"], 0]),
    ("request", REQUEST, ("plan", "between"), [["head"], [["head", "x"]], 0]),
    *(("request", REQUEST, ("plan", key), [[""], [LONG], "head"]) for key in ("train", "send", "keep", "server")),
    ("request", REQUEST, ("plan", "freeze_encoder"), [None, "head"]),
    ("request", REQUEST, ("phase",), ["features", None]),
    ("request", REQUEST, ("versions",), [{"head": -1}, {"": 0}, {LONG: 0}, []]),
    ("request", REQUEST, ("first",), [None, 2]),
    ("request", REQUEST, ("span",), [[0.0, 1.1], [-0.1, 1.0], [0.0], [0.0, 0.5, 1.0]]),
    ("reply", REPLY, ("client",), ["", LONG]),
    ("reply", REPLY, ("examples",), [0, 1.5]),
    ("reply", REPLY, ("loss",), ["x"]),
    ("reply", REPLY, ("steps",), [-1]),
    *(("reply", REPLY, ("work", key), [-1, None]) for key in ("tokens", "pairs", "predicted")),
    ("reply", REPLY, ("flops",), [-1]),
    ("reply", REPLY, ("seconds",), [-0.1]),
    ("reply", REPLY, ("scores",), [{"a": 1.5}, {"": {"loss": 1.5}}, {"a": {"": 1.5}}, {"a": {"loss": "x"}}]),
]


def message_of(kind: str, header: dict[str, Any]) -> bytes:
    return save({}, {"kind": kind, "run": RUN, "header": json.dumps(header), "parts": "[]"})


def changed(header: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A header with another value at a path; ``...`` leaves the key out."""
    changed = copy.deepcopy(header)
    table = changed
    for key in path[:-1]:
        table = table[key]
    if value is ...:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    return changed


@pytest.mark.parametrize(("kind", "header", "path", "values"), INVALID)
def test_a_header_is_checked_field_by_field(
    kind: str, header: dict[str, Any], path: tuple[str, ...], values: list[Any]
) -> None:
    """Every field is there, within its bounds; and there are no others."""
    decode_message(message_of(kind, header), kind)
    for value in [*values, ...]:
        with pytest.raises(WireError, match=f"not a {kind}: "):
            decode_message(message_of(kind, changed(header, path, value)), kind)
    with pytest.raises(WireError, match=f"not a {kind}: "):
        decode_message(message_of(kind, changed(header, (*path[:-1], "more"), 1)), kind)


def test_every_field_of_a_header_is_tried() -> None:
    for kind, header in (("request", REQUEST), ("reply", REPLY)):
        tried = {path for name, _, path, _ in INVALID if name == kind}
        for name, value in header.items():
            nested = {(name, key) for key in value} if name in ("plan", "work") else {(name,)}
            assert nested <= tried
        model = KINDS[kind].model_fields
        assert model.keys() == header.keys()


class Top(FedSplitBERT):
    """Trains the top layer and the head, sends the head."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        return request().plan


def site_in(folder: Path) -> Site:
    """A site that finds on its disk what a former program left there."""
    runtime = make_runtime(
        tiny_model("bert", "classify", num_labels=3), Classify(0, ("x", "y", "z")), batch_size=2
    )
    tokens = Tokens(np.full(20, 5, np.int32), np.arange(0, 21, 5), np.arange(4))
    examples = Examples(tokens, np.arange(4) % 3)
    data = ClientData(examples, np.arange(4), examples, {"a": np.arange(0)}, Store(folder))
    return Site("a", Top(), "classify", runtime, data, folder)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_in(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"client": "b"}, "client: is 'b', this is 'a'"),
        ({"versions": {"head": 1, "tail": 0}}, "names no part of this client's model: tail"),
        ({"versions": {"embeddings": 2, "head": 1}}, "embeddings: version 2 was never sent, this client holds 0"),
        ({"versions": {}}, "head: comes without its version"),
        ({"plan": Plan((0, 9), ("head",))}, r"plan.layers: \[9\]"),
        ({"plan": Plan((0, 2), ("layer.2", "head"), ("layer.2", "head"))}, "not that of its method to train"),
        (
            {"plan": Plan((0, 2), ("layer.2", "head"), ("head", "layer.0"), ("layer.2",))},
            "not that of its method to train",
        ),
        ({"plan": Plan((0, 1, 2), (), ("layer.1",)), "phase": "evaluate"}, "not that of its method to evaluate"),
        ({"plan": Plan((0, 1, 2), (), ("layer.1",)), "phase": "receive"}, "not that of its method to receive"),
        ({"phase": "hidden_states"}, "not that of its method to hidden_states"),
        ({"parts": {"head": {"classifier.weight": torch.ones(3, 32)}}}, "names differ"),
        ({"parts": head(torch.ones(3, 31))}, "must be"),
        ({"parts": head(torch.full((3, 32), torch.inf))}, "not finite"),
        ({"versions": {"head": 0}, "parts": head(torch.ones(3, 31))}, "must be"),
        ({"phase": "evaluate", "plan": Plan((0, 1, 2), ())}, "not that of its method to evaluate"),
        (
            {
                "phase": "evaluate",
                "plan": Plan((0, 1, 2), (), (), ("layer.2",)),
                "versions": {**dict.fromkeys(("embeddings", "layer.0", "layer.1", "pooler"), 0), "head": 1},
            },
            "has no test rows of its own",
        ),
        (
            {"versions": {"embeddings": 0, "layer.0": 0, "head": 1}},
            "versions: lacks pooler, from which the client",
        ),
    ],
)
def test_a_site_checks_what_it_is_asked(site: Site, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        site.answer(request(**changes))


def test_no_more_leaves_a_site_than_its_limit(site: Site) -> None:
    sent = sum(t.numel() * 4 for t in site.answer(request()).weights["head"].values())
    site.limit = sent
    site.answer(request())
    site.limit = sent - 1
    with pytest.raises(WireError, match=f"its limit is {sent - 1} bytes a round, this one takes {sent} or more"):
        site.answer(request())


class Echo:
    """Layers of a server that change nothing; it has all messages."""

    def __init__(self) -> None:
        self.messages: list[Tensors] = []

    def begin(self, pace: ScheduleSpan) -> None:
        pass

    def forward(self, message: Tensors) -> Tensors:
        self.messages.append(message)
        return {"activations": message["activations"]}

    def backward(self, message: Tensors) -> Tensors:
        self.messages.append(message)
        return message


def test_no_more_than_the_limit_goes_to_the_servers_layers(tmp_path: Path) -> None:
    """The message that would exceed it does not leave, not only the reply at the round's end."""
    site = site_in(tmp_path)
    site.method = FedBERT()
    plan = make_plan(site.method, site.runtime.working.parts, "classify", 0, "a", Streams(0))
    versions = dict.fromkeys(plan.received(site.runtime.working.parts), 0)
    asked = Request(0, "a", plan, "train", versions, {}, span=(0.0, 0.2))
    links = [Echo(), Echo(), Echo()]
    site.reach = lambda request: nullcontext(links[0])
    site.answer(asked)
    assert len(links[0].messages) == 4, "two batches, there and back"
    two = sum(map(payload_bytes, links[0].messages[:2]))
    for link, site.limit, left in zip(links[1:], (two, two - 1), (2, 1), strict=True):
        site.reach = lambda request, link=link: nullcontext(link)
        with pytest.raises(WireError, match=f"its limit is {site.limit} bytes a round"):
            site.answer(asked)
        assert len(link.messages) == left


def test_what_goes_to_the_servers_layers_and_what_is_replied_count_together(tmp_path: Path) -> None:
    """Each had the whole limit for itself, so that nearly twice as much left in a round."""
    site, link = site_in(tmp_path), Echo()
    site.method = FedBERT()
    plan = make_plan(site.method, site.runtime.working.parts, "classify", 0, "a", Streams(0))
    versions = dict.fromkeys(plan.received(site.runtime.working.parts), 0)
    asked = Request(0, "a", plan, "train", versions, {}, span=(0.0, 0.2))
    site.reach = lambda request: nullcontext(link)
    reply = site.answer(asked)
    both = sum(map(payload_bytes, [*link.messages, *reply.weights.values()]))
    site.limit = both
    site.answer(asked)
    site.limit = both - 1
    with pytest.raises(WireError, match=f"its limit is {both - 1} bytes a round, this one takes {both} or more"):
        site.answer(asked)


def test_who_sends_hidden_states_neither_trains_nor_sends_parts() -> None:
    method, fits = FedFreezeBERT(variant="centralized"), EXCHANGES["hidden_states"].fits
    plan = method.plan(find_parts(tiny_model("bert", "classify")), "classify", 0, "a", Streams(0))
    asked = request(plan=replace(plan, train=()), phase="hidden_states", round=0)
    assert fits(asked, plan)
    assert not fits(replace(asked, plan=replace(plan, train=(), send=("head",))), plan)
    assert not fits(request(plan=plan, phase="train"), plan)


def test_a_site_that_starts_again_holds_what_it_was_sent(site: Site) -> None:
    site.answer(request())
    one, other = (running.answer(request(parts={})) for running in (site, site_in(site.folder)))
    assert all(torch.equal(one.weights["head"][n], other.weights["head"][n]) for n in one.weights["head"])
    [held] = (site.folder / "held").iterdir()
    assert held.name == "head@1.safetensors"


def test_a_server_that_starts_again_may_go_back_to_what_it_committed(site: Site) -> None:
    versions = request().versions
    replies = []
    for version in range(1, 7):
        parts = head(torch.full((3, 32), float(version)))
        replies.append(site.answer(request(versions={**versions, "head": version}, parts=parts)))
    back = site_in(site.folder).answer(request(versions={**versions, "head": 2}, parts={}))
    assert torch.equal(back.weights["head"]["classifier.weight"], replies[1].weights["head"]["classifier.weight"])
    with pytest.raises(WireError, match="head: version 1 was never sent"):
        site.answer(request(versions={**versions, "head": 1}, parts={}))


def test_of_layers_that_the_server_held_no_whole_model_is_saved(tmp_path: Path) -> None:
    """What transformers would load with new layers in it is no folder of a model."""
    weights = {"head": {"classifier.weight": torch.ones(2)}}
    site = SimpleNamespace(
        name="a",
        shared=dict.fromkeys(weights),
        model=lambda rounds: weights,
        data=SimpleNamespace(store=Store(tmp_path / "store")),
    )
    parts = SimpleNamespace(names=("layer.0", "head"))
    ready = SimpleNamespace(
        runtime=SimpleNamespace(working=SimpleNamespace(parts=parts)),
        loaded=SimpleNamespace(model=torch.nn.Linear(2, 2), adapter=None),
    )
    save_own_model(site, ready, 2, tmp_path / "model")  # type: ignore[arg-type]
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"README.md", "own_parts.safetensors"}
    assert read_tensors(tmp_path / "model" / "own_parts.safetensors").keys() == {"classifier.weight"}
