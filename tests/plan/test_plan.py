"""Plans: what they build, and what is refused before anything is trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from tiny import tiny_model


@pytest.fixture(scope="module")
def parts() -> Parts:
    return find_parts(tiny_model(head="classify", layers=4))


@pytest.mark.parametrize(
    ("layers", "built"),
    [
        ((0, 1, 2, 3), ("embeddings", "layer.0", "layer.1", "layer.2", "layer.3", "pooler", "head")),
        ((0, 3, 3), ("embeddings", "layer.0", "layer.3", "pooler", "head")),
        ((3, 1), ("embeddings", "layer.1", "layer.3", "pooler", "head")),
        ((), ("embeddings", "pooler", "head")),
    ],
)
def test_builds_every_layer_once_in_the_models_order(
    parts: Parts, layers: tuple[int, ...], built: tuple[str, ...]
) -> None:
    assert Plan(layers, ()).builds(parts) == built


def test_layer_1_is_not_taken_for_layer_10() -> None:
    deep = find_parts(tiny_model(layers=11))
    assert Plan((10,), ()).builds(deep) == ("embeddings", "layer.10", "head")
    with pytest.raises(ValueError, match=r"layer\.1'"):
        Plan((10,), ("layer.1",)).check(deep)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((0, 1, 2, 3), ("embeddings", "layer.0", "pooler", "head")),
        Plan((0, 3, 3), ("layer.0", "head"), ("layer.0", "head")),
        Plan((0, 3, 3), ("head",), ("layer.3",)),
        Plan((0, 1), ("layer.0", "layer.1"), ("layer.0",), ("layer.1",)),
        Plan((), ("head",)),
    ],
)
def test_a_sound_plan_passes(parts: Parts, plan: Plan) -> None:
    plan.check(parts)


@pytest.mark.parametrize("field", ["train", "send", "keep"])
@pytest.mark.parametrize("name", ["layer.2", "layer.9", "classifier", "layer"])
def test_a_part_that_is_not_built_is_refused(parts: Parts, field: str, name: str) -> None:
    changes: dict[str, Any] = {"train": (), field: ("head", name)}
    with pytest.raises(ValueError, match=rf"plan\.{field}: '{name}' is not built by layers \(0, 1, 3\)"):
        Plan((0, 1, 3), **changes).check(parts)


def test_a_trained_layer_stands_once(parts: Parts) -> None:
    with pytest.raises(ValueError, match=r"plan\.train: layers \[2\] stand in the local model more than once"):
        Plan((0, 2, 2, 3, 3), ("layer.2", "head")).check(parts)


def test_a_frozen_encoder_is_not_trained() -> None:
    parts = find_parts(tiny_model("bert", "classify"))
    Plan((0, 1, 2), ("pooler", "head"), freeze_encoder=True).check(parts)
    for part in ("embeddings", "layer.2"):
        with pytest.raises(ValueError, match="of the encoder are trained"):
            Plan((0, 1, 2), (part, "head"), freeze_encoder=True).check(parts)


def test_sent_and_kept_exclude_each_other(parts: Parts) -> None:
    with pytest.raises(ValueError, match=r"\['head'\] both sent and kept"):
        Plan((0,), ("head",), ("head", "layer.0"), ("head",)).check(parts)


def test_a_plan_is_a_value() -> None:
    plan = Plan((0, 1), ("head",))
    assert plan == Plan((0, 1), ("head",), (), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.layers = (0,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "word"), [({"rounds": 0}, "rounds"), ({"rounds": "5"}, "rounds"), ({"x": 1}, "x")]
)
def test_a_methods_options_are_checked(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        FedAvg(**options)


def test_a_method_without_a_plan_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="plan"):
        Method()  # type: ignore[abstract]
