"""Parts in turns (``[wire] part_period``) against a plain loop, and the rule of who has which value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import plain_loop
from transformers import AutoModelForMaskedLM

import fedstrata
from fedstrata.client import answer
from fedstrata.client.between import own_values
from fedstrata.client.setup import check_plans
from fedstrata.job.file import load
from fedstrata.methods import METHODS
from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.parts import find_parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.sharing import Sharing, due, last_sent, turns
from fedstrata.plan.streams import Streams
from tiny import tiny_model

Jobs = Callable[..., dict[str, Any]]
STILL = {"dropout": False, "learning_rate": 1e-2, "batch_size": 2}


def parts_in_turns(period: int) -> Any:
    from dataclasses import replace

    return replace(find_parts(tiny_model()), sharing=Sharing(period=period))


def test_of_many_clients_those_who_are_asked_are_checked(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients in all rounds took 8 s for 100 rounds of 10,000 clients, of which 100 train in each."""
    config = job(wire={"part_period": 2}, clients={"count": 200, "fraction": 0.05}, method={"rounds": 6})
    planned, plan = list[str](), FedAvg.plan

    def counted(method: FedAvg, parts: Any, task: str, round: int, client: str, streams: Streams) -> Plan:
        planned.append(client)
        return plan(method, parts, task, round, client, streams)

    monkeypatch.setattr(FedAvg, "plan", counted)
    check_plans(load(config)[0], parts_in_turns(2), [f"client-{i:03}" for i in range(200)])
    assert 60 <= len(planned) < 100


def test_what_a_client_that_is_none_would_send_is_not_counted(job: Jobs) -> None:
    """Of fewer layers than any client has: a default that nobody takes."""
    layers = {"default": 1, **{f"client-{i}": 3 for i in range(3)}}
    method = {"variant": "all", "local_layers": layers, "rounds": 4}
    config = job("fedbfpt", wire={"part_period": 4}, method=method)
    check_plans(load(config)[0], parts_in_turns(4), list(layers)[1:])


@pytest.mark.parametrize("fraction", [1.0, 0.67])
def test_between_two_rounds_in_which_a_part_is_sent_every_client_goes_on_with_its_own(
    job: Jobs, fraction: float
) -> None:
    rounds, period = 7, 3
    config = job(
        wire={"part_period": period}, method={"rounds": rounds}, clients={"fraction": fraction}, train=STILL
    )
    loop = plain_loop({**config, "wire": {}})
    sizes = {part.name: part.elements for part in find_parts(tiny_model()).each}
    order = sorted(sizes, key=lambda name: -sizes[name])
    sums, turn = [0] * period, {}
    for name in order:
        turn[name] = sums.index(min(sums))
        sums[turn[name]] += sizes[name]
    part_of = {tensor: part.name for part in find_parts(tiny_model()).each for tensor in part.shapes}

    server = loop.start()
    own: dict[str, dict[str, torch.Tensor]] = {}  # a client's values that nobody has sent since
    for round in range(rounds):
        sampled = sample_clients(list(loop.ready.shards), fraction, round, Streams(0))
        starts = {client: {**server, **own.get(client, {})} for client in sampled}
        models = {client: loop.train(client, round, starts[client], {}) for client in sampled}
        now = {n for n, part in part_of.items() if turn[part] == round % period or round == rounds - 1}
        server = {n: loop.mean(models, n) if n in now else t for n, t in server.items()}
        for kept in own.values():
            for n in now & kept.keys():
                del kept[n]
        for client, model in models.items():
            own[client] = {n: t for n, t in model.items() if n not in now}

    run = fedstrata.run(config)
    model = dict(AutoModelForMaskedLM.from_pretrained(run.folder / "model").named_parameters())
    assert all(torch.equal(model[name], tensor) for name, tensor in server.items())


def test_what_no_client_of_a_round_could_send_stays_the_clients_own(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Components of a large rank are of few clients, none of which may be sampled in the round of their turn."""
    went_on: dict[tuple[int, str], set[str]] = {}

    def spied(store: Any, request: Any, working: Any) -> Any:
        own = own_values(store, request, working)
        if request.phase == "train":
            went_on[request.round, request.client] = set(own)
        return own

    monkeypatch.setattr(answer, "own_values", spied)
    lora = {"kind": "lora", "rank": {"default": 2, "client-0": 4}, "merge": "freeze_a"}
    tables = {"adapter": lora, "wire": {"part_period": 2}, "clients": {"fraction": 0.34}, "method": {"rounds": 9}}
    run = fedstrata.run(job("fedavg", "classify", **tables))
    lines = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text("utf-8").splitlines()]
    waiting: dict[str, set[str]] = {}  # what a client has trained and nobody has sent since
    for line in (line for line in lines if line["client"] != "server"):
        client, sent = line["client"], set(line["sent"])
        assert went_on[line["round"], client] == waiting.get(client, set()), line["round"]
        waiting = {name: parts - sent for name, parts in waiting.items()}
        waiting[client] = set(line["trained"]) - sent
    assert any("above2" in part for part in went_on[8, "client-0"]), "kept in round 5; in 6 client-1 was sampled"


def test_every_part_is_sent_once_in_a_period_and_all_in_the_last_round() -> None:
    parts, method = parts_in_turns(2), METHODS["fedavg"](rounds=5)
    plans = [make_plan(method, parts, "mlm", round, "a", Streams(0)) for round in range(5)]
    for plan in plans:
        plan.check(parts)
        assert plan.train == parts.names
    assert sorted(plans[0].send + plans[1].send) == sorted(parts.names)
    assert [plan.send for plan in plans[2:4]] == [plan.send for plan in plans[:2]]
    assert plans[4].send == parts.names
    sizes = [parts.elements(plan.send) for plan in plans[:2]]
    assert max(sizes) - min(sizes) <= max(part.elements for part in parts.each)
    assert plans[0].later == plans[1].send[:0] + tuple(n for n in parts.names if n in plans[1].send)


def test_when_a_part_was_last_due_is_what_a_walk_over_the_rounds_finds() -> None:
    for period in range(1, 6):
        for turn in range(period):
            for round in range(12):
                walked = [r for r in range(round) if due(turn, period, r, 100)]
                assert last_sent(turn, period, round) == (walked[-1] if walked else -1)
    assert turns({"a": 5, "b": 4, "c": 3, "d": 2, "e": 1}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
