"""FedBT: pre-training as FedBFPT, fine-tuning by the published cycle and table."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import transformers
from pydantic import ValidationError

from fedstrata.cost.bytes import payload
from fedstrata.errors import UserError
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.methods.fedbt import FedBT, cyclic
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from tiny import tiny_model

LAYER, CLASSIFIER = 28_351_488, 4 * (13 * 768 + 13)
Variant = Literal["full", "all", "half", "map", "circle", "add"]


def bert_base(kind: str, **changes: int) -> Parts:
    auto = {"mlm": transformers.BertForMaskedLM, "classify": transformers.BertForSequenceClassification}
    with torch.device("meta"):
        return find_parts(auto[kind](transformers.BertConfig(**changes)))


@pytest.fixture(scope="module")
def bert() -> Parts:
    return bert_base("classify", num_labels=13)


def plan(parts: Parts, method: FedBT, round: int, client: str = "a", task: str = "classify") -> Plan:
    made = method.plan(parts, task, round, client, Streams(0))
    made.check(parts)
    return made


def lowest(made: Plan) -> int:
    return min(int(name.split(".")[1]) for name in made.train if name.startswith("layer."))


@pytest.mark.parametrize(
    ("depth", "cycle", "rounds", "layers"),
    [
        (12, 6, 10, [11, 10, 9, 8, 7, 6, 11, 10, 9, 8]),
        (12, 1, 3, [11, 11, 11]),
        (12, 12, 13, [*range(11, -1, -1), 11]),
        (3, 2, 5, [2, 1, 2, 1, 2]),
    ],
)
def test_the_cycle(depth: int, cycle: int, rounds: int, layers: list[int]) -> None:
    assert [cyclic(depth, cycle, round) for round in range(rounds)] == layers


@pytest.mark.parametrize("task", ["classify", "pair", "tag"])
def test_fine_tuning_trains_from_the_top_in_cycles(bert: Parts, task: str) -> None:
    method = FedBT()
    assert method.rounds == 10
    for round, layer in enumerate([11, 10, 9, 8, 7, 6, 11, 10, 9, 8]):
        made = plan(bert, method, round, task=task)
        assert made.layers == tuple(range(12))
        assert made.train == made.send == (*(f"layer.{i}" for i in range(layer, 12)), "head")
        assert made.keep == ()


def test_all_clients_train_the_same_layers(bert: Parts) -> None:
    assert plan(bert, FedBT(), 4, "a") == plan(bert, FedBT(), 4, "b")


@pytest.mark.parametrize(
    ("round", "local_lowest", "trained", "frozen", "skipped"),
    [
        (0, 7, [11], range(7), range(7, 11)),
        (1, 6, [10, 11], range(6), range(6, 10)),
        (2, 5, [9, 10, 11], range(5), range(5, 9)),
        (3, 4, [8, 9, 10, 11], range(4), range(4, 8)),
        (4, 3, [7, 8, 9, 10, 11], range(3), range(3, 7)),
        (5, 2, [6, 7, 8, 9, 10, 11], range(2), range(2, 6)),
    ],
)
def test_the_published_table_for_eight_local_layers(
    bert: Parts, round: int, local_lowest: int, trained: list[int], frozen: range, skipped: range
) -> None:
    made = plan(bert, FedBT(local_layers=8), round)
    assert len(made.layers) == 8
    assert list(made.layers[local_lowest:]) == trained
    assert list(made.layers[:local_lowest]) == list(frozen)
    assert set(range(12)) - set(made.layers) == set(skipped)
    assert made.train == made.send == (*(f"layer.{i}" for i in trained), "head")


@pytest.mark.parametrize("local", [6, 7, 8, 10, 12])
def test_local_models_of_any_size(bert: Parts, local: int) -> None:
    """l_k = l - (L_G - L_k)."""
    for round in range(6):
        made = plan(bert, FedBT(local_layers=local), round)
        layer = cyclic(12, 6, round)
        assert made.layers == (*range(layer - 12 + local), *range(layer, 12))
        assert lowest(made) == layer


def test_six_local_layers_stand_on_the_embeddings_at_the_end_of_a_cycle(bert: Parts) -> None:
    assert plan(bert, FedBT(local_layers=6), 5).layers == (6, 7, 8, 9, 10, 11)


def test_bytes_over_ten_rounds(bert: Parts) -> None:
    """The paper's 87.95 MB is this mean with a file's overhead; 3.1 layers and the classifier of 13 labels."""
    sent = [plan(bert, FedBT(), round).send for round in range(10)]
    assert sum(len(parts) - 1 for parts in sent) / 10 == 3.1
    mean = sum(payload(bert, parts) for parts in sent) / 10
    assert mean == 3.1 * 28_351_488 + 4 * (13 * 768 + 13)
    assert round(mean / 1e6, 2) == 87.93


@pytest.mark.parametrize("rounds", [5, 6, 10, 20])
def test_pre_training_is_fedbfpts(rounds: int) -> None:
    parts = bert_base("mlm")
    for round in range(rounds):
        for client in ("a", "b"):
            same = FedBFPT(rounds=rounds).plan(parts, "mlm", round, client, Streams(0))
            made = plan(parts, FedBT(rounds=rounds), round, client, "mlm")
            assert made == same
            assert payload(parts, made.send) == 30_842_088


def test_pre_training_takes_local_layers() -> None:
    parts = bert_base("mlm")
    assert len(plan(parts, FedBT(local_layers=8), 0, task="mlm").layers) == 8
    assert len(plan(parts, FedBT(), 0, task="mlm").layers) == 6


def test_the_pooler_is_frozen_or_trained_with_the_head(bert: Parts) -> None:
    assert "pooler" not in plan(bert, FedBT(), 0).train + plan(bert, FedBT(), 0).send
    assert "pooler" in plan(bert, FedBT(), 0).builds(bert)
    made = plan(bert, FedBT(pooler="train"), 0)
    assert made.train == made.send == ("layer.11", "pooler", "head")
    with pytest.raises(ValidationError, match="pooler"):
        FedBT(pooler="yes")  # type: ignore[arg-type]


def test_a_model_without_pooler_has_none_to_train() -> None:
    parts = find_parts(tiny_model("roberta", "classify"))
    assert plan(parts, FedBT(pooler="train"), 0).train == ("layer.2", "head")


@pytest.mark.parametrize(("cycle", "local"), [(7, 6), (13, None), (2, 1), (12, 11)])
def test_a_cycle_longer_than_the_local_model_is_refused(bert: Parts, cycle: int, local: int | None) -> None:
    with pytest.raises(
        UserError, match=rf"cycle = {cycle}, local_layers = {local or 12} on a model of 12 layers; expected "
    ):
        plan(bert, FedBT(cycle=cycle, local_layers=local), 0)


def test_more_local_layers_than_the_model_has_are_refused(bert: Parts) -> None:
    with pytest.raises(UserError, match="local_layers: is 13, but the model has 12 layers"):
        plan(bert, FedBT(local_layers=13), 0)


@pytest.mark.parametrize(("local", "cycle"), [(None, 6), (4, 4), (8, 6), (1, 1)])
def test_half_the_layers_make_a_cycle_by_default(bert: Parts, local: int | None, cycle: int) -> None:
    seen = [lowest(plan(bert, FedBT(local_layers=local), round)) for round in range(12)]
    assert seen == [cyclic(12, cycle, round) for round in range(12)]
    tiny = find_parts(tiny_model(head="classify", layers=3))
    assert [lowest(plan(tiny, FedBT(), round)) for round in range(3)] == [2, 1, 2]


def parts_of(made: Plan) -> list[int]:
    return [int(name.split(".")[1]) for name in made.train if name.startswith("layer.")]


def test_all_is_fedavg(bert: Parts) -> None:
    for round in range(10):
        assert plan(bert, FedBT(variant="all"), round) == FedAvg().plan(bert, "classify", round, "a", Streams(0))


@pytest.mark.parametrize(
    ("variant", "trained", "mean_bytes"),
    [
        ("full", [[11], [10, 11], [9, 10, 11], [8, 9, 10, 11]], 3.1 * LAYER + CLASSIFIER),
        ("map", [[11], [10, 11], [9, 10, 11], [8, 9, 10, 11]], 3.1 * LAYER + CLASSIFIER),
        ("half", [[6, 7, 8, 9, 10, 11]] * 4, 6 * LAYER + CLASSIFIER),
        ("circle", [[11]] * 4, LAYER + CLASSIFIER),
        ("add", [[11], [10], [9], [8]], LAYER + CLASSIFIER),
    ],
)
def test_the_variants_of_fine_tuning(
    bert: Parts, variant: Variant, trained: list[list[int]], mean_bytes: float
) -> None:
    """What each trains, and the mean bytes of ten rounds (the paper's 87.95, 170.2 and 28.37 MB with overhead)."""
    plans = [plan(bert, FedBT(variant=variant), round) for round in range(10)]
    assert [parts_of(made) for made in plans[:4]] == trained
    for made in plans:
        assert made.send == made.train
        assert made.train[-1] == "head"
        assert len(made.layers) == 12
        lowest_trained = parts_of(made)[0]
        assert made.layers[lowest_trained:] == tuple(range(lowest_trained, 12)), (
            "add builds the layers above l too"
        )
        if variant != "map":
            assert made.layers == tuple(range(12))
    assert sum(payload(bert, made.send) for made in plans) / 10 == pytest.approx(mean_bytes, abs=0.5)


@pytest.mark.parametrize("local", [6, 8, 10])
@pytest.mark.parametrize("variant", ["full", "map", "add"])
def test_the_published_grid_of_local_models(bert: Parts, local: int, variant: Variant) -> None:
    """Table 7: three sizes, three variants; map draws the frozen layers from below l, ascending."""
    drawn = set()
    for round in range(10):
        made = plan(bert, FedBT(variant=variant, local_layers=local), round)
        layer = cyclic(12, 6, round)
        frozen = layer - (12 - local)
        assert made.layers[frozen:] == tuple(range(layer, 12))
        if variant == "map":
            below = made.layers[:frozen]
            assert list(below) == sorted(below)
            assert all(0 <= i < layer for i in below)
            drawn.add(below)
        else:
            assert made.layers[:frozen] == tuple(range(frozen))
        assert parts_of(made) == ([layer] if variant == "add" else list(range(layer, 12)))
    assert variant != "map" or len(drawn) >= 9, "drawn anew in every round; at most one draws nothing"


def test_map_draws_with_replacement_for_each_client(bert: Parts) -> None:
    method = FedBT(variant="map", local_layers=12)
    drawn = [plan(bert, method, 0, f"client-{i}").layers[:11] for i in range(50)]
    assert len(set(drawn)) > 45
    assert any(len(set(layers)) < 11 for layers in drawn)


@pytest.mark.parametrize("variant", ["pl", "m", "s", "sp", "all"])
def test_the_variants_of_pre_training_are_fedbfpts(variant: Literal["pl", "m", "s", "sp", "all"]) -> None:
    parts = bert_base("mlm")
    for round in range(10):
        same = FedBFPT(rounds=10, variant=variant).plan(parts, "mlm", round, "a", Streams(0))
        assert plan(parts, FedBT(variant=variant), round, "a", "mlm") == same


@pytest.mark.parametrize(
    ("task", "variant"), [("classify", "pl"), ("classify", "sp"), ("mlm", "half"), ("mlm", "circle")]
)
def test_a_variant_of_the_other_task_is_refused(bert: Parts, task: str, variant: Variant) -> None:
    with pytest.raises(
        UserError, match=rf"\[method\] variant: '{variant}' is none of task '{task}'; .*expected one of: full"
    ):
        plan(bert, FedBT(variant=variant), 0, task=task)


@pytest.mark.parametrize(("variant", "local"), [("half", 5), ("all", 8)])
def test_a_local_model_too_shallow_for_its_variant_is_refused(bert: Parts, variant: Variant, local: int) -> None:
    with pytest.raises(UserError, match=rf"local_layers = {local} on a model of 12 layers"):
        plan(bert, FedBT(variant=variant, local_layers=local, cycle=1), 0)


def test_clients_of_different_depth_train_the_same_layers(bert: Parts) -> None:
    """The cycle must fit the shallowest; a deep client drops fewer frozen layers."""
    method = FedBT(local_layers={"default": 12, "small": 8})
    for round in range(10):
        small, big = plan(bert, method, round, "small"), plan(bert, method, round, "big")
        assert small.train == big.train
        assert (len(small.layers), len(big.layers)) == (8, 12)
    with pytest.raises(UserError, match="cycle = 6, local_layers = 4"):
        plan(bert, FedBT(local_layers={"default": 12, "small": 4}, cycle=6), 0)
