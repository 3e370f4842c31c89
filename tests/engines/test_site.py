"""Every client in a place of its own, reached by bytes alone: the same run, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstrata
from fedstrata import stages
from fedstrata.core.client import Reply, Request, Worker
from fedstrata.core.parts import find
from fedstrata.core.plan import Plan
from fedstrata.core.rng import Streams
from fedstrata.core.settings import Local
from fedstrata.cost.flops import Positions
from fedstrata.data.tokens import Tokens
from fedstrata.engines.site import Site, Sites
from fedstrata.nn.batching import Index
from fedstrata.tasks import Examples
from fedstrata.tasks.classify import Classify
from fedstrata.wire.messages import of_reply, of_request, reply_in, request_in
from fedstrata.wire.tensors import WireError
from tiny import tiny_model

Jobs = Callable[..., dict[str, Any]]


def own(examples: Examples, index: Index) -> Examples:
    """A client's examples as it would have read them itself: no other's are there, and its own count from 0."""
    tokens = examples.tokens
    lengths = tokens.lengths[index]
    ids = np.concatenate([tokens[i] for i in index])
    made = Tokens(ids, np.concatenate([[0], np.cumsum(lengths)]), np.arange(len(index)))
    labels = None if examples.labels is None else examples.labels[index]
    return Examples(made, labels)


def apart(
    *,
    worker: Worker,
    examples: Examples,
    shards: Mapping[str, Index],
    test: Examples,
    tests: Mapping[str, Mapping[str, Index]],
    folder: Path,
    **_: Any,
) -> Sites:
    """In place of the in-process engine: a worker, examples and a disk of its own for each client."""
    sites = {
        name: Site(
            name=name,
            worker=Worker(
                copy.deepcopy(worker.model), worker.parts, worker.task, worker.local, worker.streams, worker.dtype
            ),
            train=own(examples, index),
            test=own(test, tests[name][name]) if name in tests else None,
            folder=folder / name,
            allow=("weights", "features"),
        )
        for name, index in shards.items()
    }
    return Sites(list(sites), lambda name, message: sites[name].answer(message))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"train": {"optimiser": "kept", "schedule": "polynomial", "warmup": 0.2}}),
    ("fedprox", {"train": {"proximal_mu": 0.5}}),
    ("fedadam", {"clients": {"fraction": 0.67}, "method": {"rounds": 4}}),
    ("fedbfpt", {"task": {"kind": "mlm"}}),
    ("fedbt", {"method": {"cycle": 2}}),
    ("fedsplitbert", {"clients": {"test": 0.3}, "wire": {"dtype": "int8"}, "method": {"rounds": 3}}),
    ("fedfreezebert", {"head": {"kind": "average"}, "wire": {"dtype": "bf16"}}),
    (
        "fedfreezebert",
        {
            "head": {"kind": "ordinary"},
            "method": {"variant": "centralised"},
            "client": {"allow": ["weights", "features"]},
        },
    ),
    ("local", {"clients": {"test": 0.3}}),
]


@pytest.mark.parametrize(("name", "tables"), CASES)
def test_sites_apart_end_in_the_same_bits(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tables: dict[str, Any]
) -> None:
    tables = dict(tables)
    kind = tables.pop("task", {"kind": "classify"})["kind"]
    made = job(name, kind, 3, **tables)
    if "test" in made["clients"]:
        del made["data"]["test"]
    here = fedstrata.run({**made, "output": {"dir": str(tmp_path / "here")}})
    monkeypatch.setattr(stages, "InProcess", apart)
    there = fedstrata.run({**made, "output": {"dir": str(tmp_path / "there")}})
    one, other = (load_file(run.model / "model.safetensors") for run in (here, there))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (here.score, here.bytes, here.flops) == (there.score, there.bytes, there.flops)
    assert (here.folder / "ledger.jsonl").read_text() == (there.folder / "ledger.jsonl").read_text()


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
        "span": (0.1, 1 / 3),
    }
    return Request(**{**fields, **changes})


def test_a_request_and_a_reply_come_back_as_they_were() -> None:
    sent = request()
    back = request_in(of_request(sent))
    assert {**vars(back), "parts": None} == {**vars(sent), "parts": None}
    assert torch.equal(back.parts["head"]["classifier.weight"], torch.ones(3, 32))
    weights = {"head": {"w": torch.ones(2, dtype=torch.bfloat16)}, "embeddings": {"v": torch.zeros(9)}}
    reply = Reply("a", 7, weights, 0.1, 3, Positions(4, 5, 6), 9, 0.25)
    again = reply_in(of_reply(reply))
    assert {**vars(again), "weights": None} == {**vars(reply), "weights": None}
    assert again.weights["head"]["w"].dtype == torch.bfloat16
    assert list(again.weights) == ["head", "embeddings"]
    nothing = reply_in(of_reply(Reply("a", 7, scores={"a": {"loss": 1.5}})))
    assert nothing.scores == {"a": {"loss": 1.5}}
    assert nothing.weights == {}
    assert nothing.loss != nothing.loss


@pytest.mark.parametrize("message", [b"", b"nonsense", b"\xff" * 40, of_reply(Reply("a", 1))[:-3]])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    for read in (request_in, reply_in):
        with pytest.raises(WireError, match=r"not a (request|reply): "):
            read(message)


def test_a_reply_is_no_request() -> None:
    with pytest.raises(WireError, match="not a request"):
        request_in(of_reply(Reply("a", 1)))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    model = tiny_model("bert", "classify", num_labels=3)
    worker = Worker(model, find(model), Classify(0, ("x", "y", "z")), Local(batch_size=2), Streams(0))
    tokens = Tokens(np.full(20, 5, np.int32), np.arange(0, 21, 5), np.arange(4))
    return Site("a", worker, Examples(tokens, np.arange(4) % 3), None, tmp_path, ("weights",))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"client": "b"}, "client: is 'b', this is 'a'"),
        ({"versions": {"head": 1, "tail": 0}}, "names no part of the model: tail"),
        ({"versions": {"embeddings": 2, "head": 1}}, "embeddings: version 2 was never sent, this client holds 0"),
        ({"versions": {}}, "head: comes without its version"),
        ({"plan": Plan((0, 9), ("head",))}, r"plan.layers: \[9\]"),
        ({"parts": {"head": {"classifier.weight": torch.ones(3, 32)}}}, "names differ"),
        ({"parts": head(torch.ones(3, 31))}, "must be"),
        ({"parts": head(torch.full((3, 32), torch.inf))}, "not finite"),
        ({"phase": "features", "parts": {}, "versions": {}}, "lets nothing leave but weights; asked for features"),
        ({"phase": "evaluate"}, "has no test rows of its own"),
    ],
)
def test_a_site_checks_what_it_is_asked(site: Site, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        site.answer(of_request(request(**changes)))


def test_a_site_that_starts_again_holds_what_it_was_sent(site: Site) -> None:
    plan = Plan((0, 1, 2), ("head",), ("head",))
    versions = dict.fromkeys(site.worker.parts.names, 0) | {"head": 1}
    first = request(plan=plan, versions=versions)
    site.answer(of_request(first))
    later = request(plan=plan, versions=versions, parts={}, round=4)
    model = tiny_model("bert", "classify", num_labels=3)
    worker = Worker(model, site.worker.parts, site.worker.task, site.worker.local, site.worker.streams)
    again = Site("a", worker, site.train, None, site.folder, ("weights",))
    one, other = (reply_in(each.answer(of_request(later))) for each in (site, again))
    assert all(torch.equal(one.weights["head"][n], other.weights["head"][n]) for n in one.weights["head"])
    [held] = (site.folder / "held").iterdir()
    assert held.name == "head@1.safetensors"
