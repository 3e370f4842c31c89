"""FedSplitBERT: which parts are whose, its two ends, what crosses the wire, and that private parts survive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers

import fedstrata
from fedstrata.cost.bytes import payload
from fedstrata.engines.local import LocalEngine
from fedstrata.errors import UserError
from fedstrata.events import Replied
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedsplitbert import FedSplitBERT
from fedstrata.methods.local import Local
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from tiny import saved_tensors, tiny_model

Jobs = Callable[..., dict[str, Any]]
EMBEDDINGS, LAYER = 95_348_736, 28_351_488


@pytest.fixture(scope="module")
def bert() -> Parts:
    with torch.device("meta"):
        return find_parts(transformers.BertForSequenceClassification(transformers.BertConfig()))


def plan(parts: Parts, method: FedSplitBERT) -> Plan:
    made = method.plan(parts, "classify", 0, "a", Streams(0))
    made.check(parts)
    return made


@pytest.mark.parametrize("critical", [1, 4, 6, 8, 10, 11])
def test_lower_layers_are_sent_upper_ones_kept(bert: Parts, critical: int) -> None:
    made = plan(bert, FedSplitBERT(critical_layer=critical))
    assert made.layers == tuple(range(12))
    assert made.train == bert.names
    assert made.send == ("embeddings", *(f"layer.{i}" for i in range(critical)))
    assert made.keep == (*(f"layer.{i}" for i in range(critical, 12)), "pooler", "head")


def test_half_the_layers_by_default(bert: Parts) -> None:
    assert plan(bert, FedSplitBERT()) == plan(bert, FedSplitBERT(critical_layer=6))


def test_the_two_ends(bert: Parts) -> None:
    """c = L is FedAvg's plan, c = 0 that of clients alone."""
    assert plan(bert, FedSplitBERT(critical_layer=12)) == FedAvg().plan(bert, "classify", 0, "a", Streams(0))
    assert plan(bert, FedSplitBERT(critical_layer=0)) == Local().plan(bert, "classify", 0, "a", Streams(0))


@pytest.mark.parametrize("where", ["local", "frozen"])
def test_embeddings_may_stay_at_home_or_as_they_are(bert: Parts, where: Literal["local", "frozen"]) -> None:
    made = plan(bert, FedSplitBERT(critical_layer=6, embeddings=where))
    assert made.send == tuple(f"layer.{i}" for i in range(6))
    assert ("embeddings" in made.train) == ("embeddings" in made.keep) == (where == "local")


def test_bytes_of_the_paper(bert: Parts) -> None:
    """0.51 GB per round of three clients without the embeddings, half of it in 16 bits."""
    made = plan(bert, FedSplitBERT(critical_layer=6))
    assert payload(bert, made.send) == 6 * LAYER + EMBEDDINGS
    assert 6 * LAYER == 170_108_928
    assert payload(bert, made.send, "fp16") * 2 == payload(bert, made.send)
    assert [payload(bert, plan(bert, FedSplitBERT(critical_layer=c)).send) for c in (0, 12)] == [
        0,
        payload(bert, bert.names),
    ]


def test_more_layers_than_there_are_is_refused(bert: Parts) -> None:
    with pytest.raises(UserError, match=r"\[method\] critical_layer: is 13, but .* expected 0 to 12"):
        plan(bert, FedSplitBERT(critical_layer=13))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return saved_tensors(folder / "model")


@pytest.mark.parametrize("server", [{}, {"optimizer": "adam"}])
def test_at_the_top_it_is_fedavg_bit_for_bit(job: Jobs, tmp_path: Path, server: dict[str, Any]) -> None:
    split = fedstrata.run(
        job("fedsplitbert", "classify", 3, method={"critical_layer": 3}, server=server),
        {"output.dir": str(tmp_path / "split")},
    )
    whole = fedstrata.run(job("fedavg", "classify", 3, server=server), {"output.dir": str(tmp_path / "whole")})
    assert split.score == whole.score
    one, other = weights(split.folder), weights(whole.folder)
    assert all(one[name].equal(other[name]) for name in other)


def test_at_the_bottom_clients_are_alone(job: Jobs, tmp_path: Path) -> None:
    made = [
        job(name, "classify", 3, method=options, output={"dir": str(tmp_path / name)})
        for name, options in (("fedsplitbert", {"critical_layer": 0}), ("local", {}))
    ]
    alone, local = map(fedstrata.run, made)
    assert alone.bytes == {"up": 0, "down": 0, "setup": 0}
    assert alone.clients == local.clients
    for client in local.clients:
        one, other = (weights(run.folder / "clients" / client) for run in (alone, local))
        assert all(one[name].equal(other[name]) for name in other)


@pytest.mark.parametrize("tables", [{}, {"wire": {"dtype": "fp16"}}, {"server": {"optimizer": "adam"}}])
def test_private_parts_are_in_no_message(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any]
) -> None:
    """Every request and every reply of a run is looked into."""
    seen: dict[str, set[str]] = {"down": set(), "up": set()}
    original = LocalEngine.exchange

    def watched(self: LocalEngine, requests: Iterable[Request]) -> Iterator[Reply]:
        def pass_on() -> Iterator[Request]:
            for request in requests:
                seen["down"].update(name for tensors in request.parts.values() for name in tensors)
                yield request

        for reply in original(self, pass_on()):
            seen["up"].update(name for tensors in reply.weights.values() for name in tensors)
            yield reply

    monkeypatch.setattr(LocalEngine, "exchange", watched)
    fedstrata.run(job("fedsplitbert", "classify", 3, method={"critical_layer": 1}, **tables))
    parts = find_parts(tiny_model(head="classify", num_labels=3))
    shared = {name for part in ("embeddings", "layer.0") for name in parts.shapes[part]}
    assert seen == {"down": shared, "up": shared}


def test_clients_end_with_models_of_their_own(job: Jobs, tmp_path: Path) -> None:
    made = job("fedsplitbert", "classify", 3, method={"critical_layer": 1})
    result = fedstrata.run(made)
    models = [weights(tmp_path / "run" / "clients" / client) for client in result.clients]
    for name in models[0]:
        same = all(model[name].equal(models[0][name]) for model in models)
        assert same == (
            "layer.1" not in name and "layer.2" not in name and "pooler" not in name and "class" not in name
        )
    assert all(client["score"] for client in result.clients.values())
    mean = sum(client["score"]["loss"] for client in result.clients.values()) / 3
    assert result.score["loss"] == pytest.approx(mean)


@pytest.mark.parametrize("stop_at", [(0, "client-1"), (2, "client-0"), (2, "client-2")])
def test_private_parts_survive_a_kill(job: Jobs, tmp_path: Path, stop_at: tuple[int, str]) -> None:
    made = job("fedsplitbert", "classify", 3, method={"rounds": 4}, clients={"fraction": 0.67})
    whole = fedstrata.run(made, {"output.dir": str(tmp_path / "whole")})
    stopped = []

    def stop(event: Any) -> None:
        if isinstance(event, Replied) and (event.round, event.client) >= stop_at and not stopped:
            stopped.append(event)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, progress=stop)
    again = fedstrata.run(made, resume=True)
    assert again.score == whole.score
    for client in whole.clients:
        one, other = (weights(run.folder / "clients" / client) for run in (again, whole))
        assert all(one[name].equal(other[name]) for name in other)
