"""FedBFPT: its schedule against the published rule and figures, its local models, its bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch
import transformers

from fedstrata.cost.bytes import payload
from fedstrata.errors import UserError
from fedstrata.methods.fedbfpt import FedBFPT, progressive, trained_layers
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from tiny import tiny_model

CLIENTS = [f"client-{i}" for i in range(1, 7)]


@pytest.fixture(scope="module")
def bert() -> Parts:
    with torch.device("meta"):
        return find_parts(transformers.BertForMaskedLM(transformers.BertConfig()))


def plan(parts: Parts, method: FedBFPT, round: int, client: str = "client-1", seed: int = 0) -> Plan:
    made = method.plan(parts, "mlm", round, client, Streams(seed))
    made.check(parts)
    return made


def published_counter(rounds: int) -> list[int]:
    """The counters of the released code: at round i, go up a layer if i == rounds - remain // 2."""
    remain, layer, made = rounds, 0, []
    for i in range(rounds):
        if i == rounds - remain // 2:
            layer += 1
            remain = rounds - i
        made.append(layer)
    return made


@pytest.mark.parametrize(
    ("rounds", "layers"),
    [
        (1, [0]),
        (2, [0, 1]),
        (3, [0, 0, 1]),
        (5, [0, 0, 0, 1, 2]),
        (6, [0, 0, 0, 1, 1, 2]),
        (7, [0] * 4 + [1] * 2 + [2]),
        (8, [0] * 4 + [1] * 2 + [2, 3]),
        (10, [0] * 5 + [1] * 3 + [2, 3]),
        (20, [0] * 10 + [1] * 5 + [2] * 3 + [3, 4]),
    ],
)
def test_published_schedules(rounds: int, layers: list[int]) -> None:
    assert progressive(rounds) == layers


@pytest.mark.parametrize(
    ("rounds", "counts"),
    [(32, [16, 8, 4, 2, 1, 1]), (63, [32, 16, 8, 4, 2, 1]), (100, [50, 25, 13, 6, 3, 2, 1])],
)
def test_published_counts(rounds: int, counts: list[int]) -> None:
    assert [len(list(group)) for _, group in itertools.groupby(progressive(rounds))] == counts


def test_the_schedule_is_the_released_codes_for_any_number_of_rounds() -> None:
    for rounds in range(1, 500):
        layers = progressive(rounds)
        assert layers == published_counter(rounds), rounds
        assert layers[-1] == rounds.bit_length() - 1  # floor(log2 I) + 1 layers are used


def test_the_plan_follows_the_schedule(bert: Parts) -> None:
    method = FedBFPT(rounds=10)
    trained = [plan(bert, method, round).train for round in range(10)]
    assert trained == [(f"layer.{layer}", "head") for layer in (0, 0, 0, 0, 0, 1, 1, 1, 2, 3)]


@pytest.mark.parametrize("rounds", [63, 64, 100, 300])
def test_the_layer_stays_within_the_local_model(bert: Parts, rounds: int) -> None:
    method = FedBFPT(rounds=rounds, local_layers=6)
    layers = [plan(bert, method, round).train[0] for round in range(rounds)]
    assert layers == [f"layer.{min(layer, 5)}" for layer in published_counter(rounds)]
    if rounds == 64:
        assert list(Counter(layers).values()) == [32, 16, 8, 4, 2, 2]


@pytest.mark.parametrize("local", [1, 2, 4, 6, 8, 11, 12])
def test_the_local_model(bert: Parts, local: int) -> None:
    """Layers 0..l stand for themselves; above them ascending ones out of those deeper than l."""
    method = FedBFPT(rounds=20, local_layers=local)
    for round, client in itertools.product(range(20), CLIENTS):
        made = plan(bert, method, round, client)
        layer = min(progressive(20)[round], local - 1)
        own, above = made.layers[: layer + 1], made.layers[layer + 1 :]
        assert len(made.layers) == local
        assert own == tuple(range(layer + 1))
        assert list(above) == sorted(above)
        assert all(layer < i < 12 for i in above)
        assert all(type(i) is int for i in made.layers)
        assert made.train == made.send == (f"layer.{layer}", "head")
        assert made.keep == ()


def test_half_the_layers_by_default(bert: Parts) -> None:
    assert len(plan(bert, FedBFPT(), 0).layers) == 6
    assert FedBFPT().rounds == 5
    for depth, local in ((1, 1), (2, 1), (3, 2), (4, 2)):
        assert len(plan(find_parts(tiny_model(layers=depth)), FedBFPT(), 0).layers) == local


def test_layers_are_drawn_with_replacement_and_uniformly(bert: Parts) -> None:
    """Five of eleven: 11*10*9*8*7 / 11^5 = 34.4 % have no repeat; each layer is 1/11 of the draws."""
    n = 600
    drawn = [plan(bert, FedBFPT(), 0, f"client-{i}").layers[1:] for i in range(n)]
    distinct = sum(len(set(layers)) == 5 for layers in drawn) / n
    share = 11 * 10 * 9 * 8 * 7 / 11**5
    assert distinct == pytest.approx(share, abs=4 * (share * (1 - share) / n) ** 0.5)
    counts = np.bincount([i for layers in drawn for i in layers], minlength=12)
    assert counts[0] == 0
    expected = 5 * n / 11
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 29.6  # chi squared, 10 degrees, 0.1 %


def test_every_client_and_round_draws_anew_and_a_draw_comes_again(bert: Parts) -> None:
    """The released code reseeds and so draws [1, 2, 3, 4, 8] for everyone; the paper does not."""
    method = FedBFPT(rounds=10)
    of_clients = {plan(bert, method, 0, f"client-{i}").layers for i in range(30)}
    of_rounds = {plan(bert, method, round).layers for round in range(5)}  # all of layer 0
    assert len(of_clients) > 25
    assert len(of_rounds) == 5
    assert plan(bert, method, 3, "client-2") == plan(bert, method, 3, "client-2")
    assert plan(bert, method, 3, "client-2") != plan(bert, method, 3, "client-2", seed=1)


def test_bytes_of_bert_base(bert: Parts) -> None:
    """29.42 MiB with a file's overhead in the paper, 7.04 % of the model."""
    method = FedBFPT(rounds=20)
    sent = {payload(bert, plan(bert, method, round).send) for round in range(20)}
    assert sent == {30_842_088}
    assert round(100 * 30_842_088 / payload(bert, bert.names), 2) == 7.04


def test_the_whole_model_may_be_local(bert: Parts) -> None:
    made = plan(bert, FedBFPT(rounds=1, local_layers=1), 0)
    assert made.layers == (0,)
    full = plan(bert, FedBFPT(rounds=100000, local_layers=12), 99_999)
    assert full.layers == tuple(range(12))
    assert full.train == ("layer.11", "head")


def test_more_local_layers_than_the_model_has_are_refused(bert: Parts) -> None:
    with pytest.raises(
        UserError, match=r"\[method\] local_layers: is 13, but the model has 12 layers; expected 1 to 12"
    ):
        FedBFPT(local_layers=13).plan(bert, "mlm", 0, "a", Streams(0))


def test_any_task_has_a_head() -> None:
    parts = find_parts(tiny_model(head="classify"))
    assert FedBFPT().plan(parts, "classify", 0, "a", Streams(0)).train == ("layer.0", "head")


def test_all_trains_the_whole_local_model(bert: Parts) -> None:
    """Table 4, row ALL: six layers, embeddings and head, 255.57 MiB with a file's overhead, 61.17 %."""
    made = plan(bert, FedBFPT(variant="all"), 4)
    assert made.layers == tuple(range(6))
    assert made.train == made.send == ("embeddings", *(f"layer.{i}" for i in range(6)), "head")
    assert payload(bert, made.send) == 95_348_736 + 6 * 28_351_488 + 2_490_600
    assert round(100 * payload(bert, made.send) / payload(bert, bert.names), 2) == 61.17
    assert {plan(bert, FedBFPT(variant="all"), i, c) for i in range(5) for c in CLIENTS} == {made}


def trained(parts: Parts, method: FedBFPT) -> list[int]:
    return [int(plan(parts, method, round).train[0].split(".")[1]) for round in range(method.rounds)]


def test_pl_stays_at_layer_0_and_samples_as_before(bert: Parts) -> None:
    method = FedBFPT(variant="pl")
    assert trained(bert, method) == [0, 0, 0, 0, 0]
    assert len({plan(bert, method, round).layers for round in range(5)}) == 5
    assert plan(bert, method, 0) == plan(bert, FedBFPT(), 0)


def test_m_builds_the_lowest_layers(bert: Parts) -> None:
    method = FedBFPT(variant="m")
    assert trained(bert, method) == [0, 0, 0, 1, 2]
    assert {plan(bert, method, round, client).layers for round in range(5) for client in CLIENTS} == {
        tuple(range(6))
    }


def test_s_redraws_only_when_the_layer_moves(bert: Parts) -> None:
    method = FedBFPT(variant="s", rounds=10)
    assert trained(bert, method) == progressive(10)
    for client in CLIENTS:
        built = [plan(bert, method, round, client).layers for round in range(10)]
        assert len(set(built[:5])) == len(set(built[5:8])) == 1
        assert len(set(built)) == 4
    assert len({plan(bert, method, 0, client).layers for client in CLIENTS}) == len(CLIENTS)


@pytest.mark.parametrize(("rounds", "layers"), [(5, [0, 1, 2, 3, 4]), (8, [0, 1, 2, 3, 4, 5, 5, 5])])
def test_sp_gives_each_layer_one_round(bert: Parts, rounds: int, layers: list[int]) -> None:
    assert trained(bert, FedBFPT(variant="sp", rounds=rounds)) == layers


@pytest.mark.parametrize("variant", ["pl", "m", "s", "sp"])
def test_ablations_cost_the_same_bytes(bert: Parts, variant: Literal["pl", "m", "s", "sp"]) -> None:
    method = FedBFPT(variant=variant)
    assert {payload(bert, plan(bert, method, round).send) for round in range(5)} == {30_842_088}


def test_the_released_codes_draws(bert: Parts) -> None:
    """Its generator is reseeded with 24 before every draw but the run's first, so all clients share them."""
    method = FedBFPT(legacy_rng=True)
    above = {0: (1, 2, 3, 4, 8), 1: (2, 4, 5, 9), 2: (3, 5, 6)}
    for round, layer in enumerate([0, 0, 0, 1, 2]):
        for client in CLIENTS:
            assert plan(bert, method, round, client).layers == (*range(layer + 1), *above[layer])


def test_one_draw_may_serve_all_clients_of_a_round(bert: Parts) -> None:
    method = FedBFPT(shared_draw=True)
    built = [{plan(bert, method, round, client).layers for client in CLIENTS} for round in range(3)]
    assert all(len(layers) == 1 for layers in built)
    assert len(set.union(*built)) == 3


@pytest.mark.parametrize("local", [2, 6, 11, 12])
def test_without_replacement_no_layer_comes_twice(bert: Parts, local: int) -> None:
    method = FedBFPT(replacement=False, local_layers=local)
    for round, client in itertools.product(range(5), CLIENTS):
        layers = plan(bert, method, round, client).layers
        assert list(layers) == sorted(set(layers))
        assert len(layers) == local


def test_several_layers_per_round(bert: Parts) -> None:
    method = FedBFPT(layers_per_round=2, rounds=10)
    for round, layer in enumerate(progressive(10)):
        made = plan(bert, method, round)
        assert made.train == made.send == (f"layer.{layer}", f"layer.{layer + 1}", "head")
        assert made.layers[: layer + 2] == tuple(range(layer + 2))
        assert all(i > layer + 1 for i in made.layers[layer + 2 :])
        assert len(made.layers) == 6
    deep = FedBFPT(layers_per_round=3, rounds=100, local_layers=4)
    assert plan(bert, deep, 99).train == ("layer.1", "layer.2", "layer.3", "head")
    with pytest.raises(UserError, match="layers_per_round: is 4, but a local model has 3 layers"):
        plan(bert, FedBFPT(layers_per_round=4, local_layers=3), 0)


def test_clients_of_different_depth(bert: Parts) -> None:
    """The layer stays within the shallowest local model, so that all train the same one."""
    method = FedBFPT(rounds=20, local_layers={"default": 6, "client-2": 3, "client-3": 12})
    for round, layer in enumerate(progressive(20)):
        plans = {client: plan(bert, method, round, client) for client in CLIENTS}
        assert {made.train for made in plans.values()} == {(f"layer.{min(layer, 2)}", "head")}
        assert [len(made.layers) for made in plans.values()] == [6, 3, 12, 6, 6, 6]
    assert len(plan(bert, FedBFPT(local_layers={"client-2": 3}), 0, "client-1").layers) == 6
    with pytest.raises(UserError, match="local_layers of 'client-2': is 13"):
        plan(bert, FedBFPT(local_layers={"client-2": 13}), 0)


def test_the_schedule_of_a_long_run_is_made_once_and_not_for_every_plan() -> None:
    assert trained_layers("full", 1000, 2) is trained_layers("full", 1000, 2)
    assert trained_layers("full", 1000, 2) != trained_layers("full", 1000, 1)
