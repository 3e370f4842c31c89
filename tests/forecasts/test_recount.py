"""What a run writes down, counted again by other means: bytes off every message, FLOPs by torch's own counter.

Forecast and ledger come out of one loop, so that they agree says nothing of whether both are right. Here the bytes
are those of the tensors that an engine hands over, and neither the ledger nor what measures messages for it has a
part in the count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedstrata
from fedstrata.client.model_pass import CachedPass
from fedstrata.client.trainer import Trainer, drain
from fedstrata.engines.local import LocalEngine
from fedstrata.exchanges import cut_pass
from fedstrata.models.heads import KEY, HeadedModel
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.reports.forecast import split_lines
from fedstrata.runs import train as train_module
from fedstrata.server.layers import SplitSession
from fedstrata.tasks import Task
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from roles import make_runtime, sentences, train_request, train_round
from tiny import model_of, saved_tensors, tiny_config, tiny_model, tokenizer

Jobs = Callable[..., dict[str, Any]]
Message = Mapping[str, torch.Tensor]


def weigh(message: Message) -> int:
    return sum(len(tensor.reshape(-1).view(torch.uint8)) for tensor in message.values())


class WeighingEngine:
    """The local engine with a scale at its door.

    Attributes:
        scale: direction -> bytes.
        met: clients that have been asked for something that needs the server's parts.
    """

    def __init__(self, **fields: Any) -> None:
        self.scale: Counter[str] = Counter()
        self.met: set[str] = set()
        self.engine = LocalEngine(**{**fields, "connect": self._weighed(fields["connect"])})

    def clients(self) -> list[str]:
        return self.engine.clients()

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for reply in self.engine.exchange(map(self._outgoing, requests)):
            self.scale["up"] += sum(map(weigh, reply.weights.values()))
            yield reply

    def _outgoing(self, request: Request) -> Request:
        self.scale["down"] += sum(map(weigh, request.parts.values()))
        if request.versions:
            self.met.add(request.client)
        return request

    def _weighed(self, connect: Any) -> Any:
        @contextmanager
        def opened(request: Request) -> Iterator[Any]:
            with connect(request) as link:
                yield None if link is None else WeighingLink(link, self.scale)

        return opened


class WeighingLink:
    """A client's way to the server's layers, with a scale."""

    def __init__(self, link: Any, scale: Counter[str]) -> None:
        self.link, self.scale = link, scale
        self.begin = link.begin

    def forward(self, message: Message) -> Message:
        return self._pass(self.link.forward, message)

    def backward(self, message: Message) -> Message:
        return self._pass(self.link.backward, message)

    def _pass(self, way: Callable[[Message], Message], message: Message) -> Message:
        reply = way(message)
        self.scale["up"] += weigh(message)
        self.scale["down"] += weigh(reply)
        return reply


CENTRALIZED = {"method": {"variant": "centralized"}, "client": {"may_send": ["weights", "hidden_states"]}}
DELTA = {"codec": "delta"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "mlm", {}),
    ("fedavg", "classify", {"wire": {"dtype": "int8"}, "clients": {"fraction": 0.67}, "method": {"rounds": 3}}),
    ("fedbfpt", "mlm", {"wire": {"dtype": "fp16"}, "clients": {"fraction": 0.34}, "method": {"rounds": 4}}),
    ("fedsplitbert", "classify", {"wire": {"dtype": "bf16"}}),
    (
        "fedavg",
        "mlm",
        {"wire": {**DELTA, "density": 0.05}, "clients": {"fraction": 0.34}, "method": {"rounds": 6}},
    ),
    ("fedavg", "mlm", {"wire": DELTA, "clients": {"fraction": 0.34}, "method": {"rounds": 9}}),
    ("fedbfpt", "mlm", {"wire": {**DELTA, "bits": 1, "dtype": "fp16"}, "clients": {"fraction": 0.67}}),
    ("fedsplitbert", "classify", {"wire": {**DELTA, "up_bits": 2, "down_density": 0.1, "rotation": True}}),
    ("fedbert", "mlm", {"method": {"mode": "share"}, "wire": {**DELTA, "density": 0.01}}),
    ("local", "mlm", {}),
    ("fedbert", "mlm", {"method": {"mode": "share"}, "wire": {"activations": "int4", "activations_density": 0.3}}),
    (
        "fedbert",
        "classify",
        {
            "method": {"mode": "parallel"},
            "wire": {"dtype": "int8", "activations": "int8", "gradients": "fp16", "gradients_density": 0.1},
        },
    ),
    ("fedfreezebert", "classify", {"head": {"kind": "psum"}}),
    ("fedfreezebert", "classify", {"head": {"kind": "cls"}, "wire": {"dtype": "int8"}, **CENTRALIZED}),
    ("fedbert", "classify", {"method": {"mode": "parallel"}, "wire": {"dtype": "fp16"}}),
    ("fedbert", "mlm", {"method": {"mode": "emb-avg"}}),
    ("fedbert", "classify", {"method": {"mode": "share", "lower": 1}, "wire": {"dtype": "bf16"}}),
]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[WeighingEngine]:
    """Those of the runs to come."""
    made: list[WeighingEngine] = []

    def weighing(**fields: Any) -> WeighingEngine:
        made.append(WeighingEngine(**fields))
        return made[-1]

    monkeypatch.setattr(train_module, "LocalEngine", weighing)
    return made


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_bytes_off_the_messages_are_those_of_ledger_and_forecast(
    job: Jobs, engines: list[WeighingEngine], name: str, kind: str, tables: dict[str, Any]
) -> None:
    made = job(name, kind, 4 if "head" in tables else 3, **tables)
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    [engine] = engines
    assert engine.scale["up"] == result.bytes["up"] == forecast["clients"]["up_bytes"]
    assert engine.scale["down"] == result.bytes["down"] == forecast["clients"]["down_bytes"]
    assert result.bytes["setup"] == len(engine.met) * initial_download(model_of(result), result.transfers)


CHANGED = {"activations_changed": 0.3, "activations": "int4", "gradients": "fp16"}


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        ("classify", {"method": {"mode": "parallel"}, "wire": CHANGED}),
        ("mlm", {"method": {"mode": "share", "lower": 1, "upper": 1}, "wire": {"activations_changed": 0.0}}),
        ("classify", {"method": {"mode": "emb-avg"}, "wire": CHANGED, "train": {"feature_cache_gb": 1e-6}}),
    ],
)
def test_where_changes_alone_are_sent_the_ledger_is_exact_and_the_forecast_its_bound(
    job: Jobs, engines: list[WeighingEngine], kind: str, tables: dict[str, Any]
) -> None:
    train = {"epochs": 3, "dropout": False, **tables.get("train", {})}
    made = job("fedbert", kind, 3, **{**tables, "train": train})
    forecasts = fedstrata.forecast(made)
    forecast, told = forecasts["fedbert"], " ".join(split_lines(forecasts))
    result = fedstrata.run(made)
    [engine] = engines
    for way in ("up", "down"):
        assert engine.scale[way] == result.bytes[way] < forecast["clients"][f"{way}_bytes"]
    assert "an epoch at most" in told
    assert "are upper bounds" in told
    assert ("texts that find no room are sent whole" in told) == ("feature_cache_gb" in train)


@pytest.mark.parametrize("merge", ["plain", "alternate"])
def test_bytes_of_adapters_that_travel_as_changes_are_those_of_ledger_and_forecast(
    job: Jobs, engines: list[WeighingEngine], merge: str
) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    adapter = {"kind": "lora", "rank": 2, "merge": merge}
    wire = {"codec": "delta", "bits": 4, "density": 0.3}
    made = job("fedavg", "classify", method={"rounds": 3}, adapter=adapter, wire=wire)
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    [engine] = engines
    assert engine.scale["up"] == result.bytes["up"] == forecast["clients"]["up_bytes"] > 0
    assert engine.scale["down"] == result.bytes["down"] == forecast["clients"]["down_bytes"] > 0


def initial_download(model: Path, ledger: list[dict[str, Any]]) -> int:
    """Bytes of a model off its file, as far as clients get it: without tied copies and the server's layers."""
    away = [f"layer.{i}." for i in range(9) if not any(e["part"] == f"layer.{i}" for e in ledger)]
    tensors = saved_tensors(model)
    return sum(
        tensor.nbytes
        for tensor_name, tensor in tensors.items()
        if not tensor_name.startswith("cls.predictions.decoder") and not any(a in tensor_name for a in away)
    )


QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLASSES = ("eye", "heart", "kidney")


def model_and_task(kind: str) -> tuple[Any, Task]:
    changes: dict[str, Any] = {"attn_implementation": "eager"}  # what torch counts is written out, not fused
    if kind == "mlm":
        return tiny_model(**changes), masked_lm(tokenizer(), len(tokenizer()), 0.15, False)
    return tiny_model(head="classify", num_labels=3, **changes), Classify(0, CLASSES)


@pytest.mark.parametrize("padding", ["batch", "max"])
@pytest.mark.parametrize(
    ("kind", "layers", "train"),
    [
        ("mlm", (0, 1, 2), ("embeddings", "layer.0", "layer.1", "layer.2", "head")),
        ("mlm", (0, 2, 2), ("layer.0", "head")),
        ("classify", (0, 1, 2), ("layer.2", "pooler", "head")),
        ("classify", (0, 1, 2), ("layer.1",)),
    ],
)
def test_flops_of_a_clients_round_are_those_that_torch_counts(
    kind: str, layers: tuple[int, ...], train: tuple[str, ...], padding: str
) -> None:
    """Batches of real texts, padding and dropout included."""
    model, task = model_and_task(kind)
    runtime = make_runtime(model, task, batch_size=5, epochs=2, padding=padding, max_tokens=32)
    with FlopCounterMode(display=False) as counter:
        reply = train_round(runtime, Plan(layers, train, train))
    assert reply.steps == 6
    assert reply.flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("room", [1e-9, 2e-5, 1.0])
def test_flops_over_a_frozen_encoder_are_those_that_torch_counts(tmp_path: Path, room: float) -> None:
    """Two epochs: what the cache holds is computed once, the rest in each of them."""
    config = tiny_config("bert", 4, num_labels=3, attn_implementation="eager", **QUIET)
    setattr(config, KEY, {"kind": "psum"})
    runtime = make_runtime(
        HeadedModel.from_config(config), Classify(0, CLASSES), batch_size=4, epochs=2, feature_cache_gb=room
    )
    index = np.arange(12)
    plan = Plan((0, 1, 2, 3), ("head",), ("head",), freeze_encoder=True)
    with FlopCounterMode(display=False) as counter:
        cache = runtime.caches.open(sentences(), index, tmp_path)
        model_pass = CachedPass(runtime.working, plan, cache, [cache.stored])
        reply, _ = drain(
            runtime.trainer.run(train_request(plan), sentences(), index, model_pass, {}, lambda *_: None)
        )
    assert reply.flops == counter.get_total_flops() > 0
    assert (len(cache.places) in (0, 12)) == (room != 2e-5)


class Inline:
    """Finishes a step where torch counts it, not in a thread of its own."""

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        done = Future[None]()
        done.set_result(call(*arguments))
        return done


OMITTED = {"privacy": {"omit": ["embeddings"]}}


@pytest.mark.parametrize(
    ("kind", "upper", "tables"),
    [
        ("mlm", 0, {}),
        ("mlm", 0, OMITTED),
        ("classify", 1, OMITTED),
        ("mlm", 1, {"adapter": {"kind": "lora", "rank": 2, "merge": "plain"}}),
        ("classify", 0, {"adapter": {"kind": "lora", "rank": 2, "merge": "plain"}}),
    ],
)
def test_flops_on_both_sides_of_a_cut_are_those_that_torch_counts(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, kind: str, upper: int, tables: dict[str, Any]
) -> None:
    """Gradients come back through the server's layers and the upper ones whether or not something below learns."""
    if "adapter" in tables:
        pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    found = Counter[str]()

    def count(owner: type, name: str, side: str) -> None:
        plain = getattr(owner, name)

        def counted(own: Any, *arguments: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                made = plain(own, *arguments)
            trains = getattr(own, "optimizer", own) is not None  # a session for a score has none
            found[side] += trains * counter.get_total_flops()
            return made

        monkeypatch.setattr(owner, name, counted)

    monkeypatch.setattr(cut_pass, "_background", Inline)
    count(SplitSession, "forward", "server")
    count(SplitSession, "backward", "server")
    count(Trainer, "_gradients", "both")
    count(cut_pass.CutPass, "step", "both")
    made = job("fedbert", kind, method={"mode": "parallel", "upper": upper, "rounds": 1}, **tables)
    result = fedstrata.run(made)
    lines = [json.loads(line) for line in (result.folder / "rounds.jsonl").read_text("utf-8").splitlines()]
    trained = [line for line in lines if line.get("steps")]
    assert sum(line["server_flops"] for line in trained) == found["server"] > 0
    assert sum(line["flops"] for line in trained) == found["both"] - found["server"] > 0
