"""What the masks between two clients of a sum hang on: all that both begin their training with."""

from __future__ import annotations

import pytest
import torch

from fedstrata.client.sum_rules import Begun
from fedstrata.plan.kinds import Weights

RECEIVED = {"one": ("a", "b"), "other": ("b", "c")}
START: Weights = {
    "a": {"v": torch.zeros(2)},
    "b": {"v": torch.zeros(2), "w": torch.ones(2)},
    "c": {"v": torch.zeros(2)},
}


def digest(b: dict[str, torch.Tensor], span: tuple[float, float] = (0.0, 0.5), **others: torch.Tensor) -> bytes:
    start = {**START, **{part: {"v": tensor} for part, tensor in others.items()}, "b": b}
    begun = Begun(RECEIVED.__getitem__, start.__getitem__, span)
    assert begun.by("one", "other") == begun.by("other", "one")
    return begun.by("one", "other")


def test_what_only_one_of_them_has_is_not_in_it() -> None:
    assert digest(START["b"], a=torch.ones(2)) == digest(START["b"], c=torch.ones(2)) == digest(START["b"])


@pytest.mark.parametrize(
    "b",
    [
        {"v": torch.zeros(2), "w": torch.tensor([1.0, 2.0])},
        {"v": torch.zeros(2), "u": torch.ones(2)},
        {"v": torch.ones(2), "w": torch.zeros(2)},
        {"v": torch.zeros(1, 2), "w": torch.ones(2)},
        {"v": torch.zeros(4, dtype=torch.float16), "w": torch.ones(2)},
    ],
    ids=["value", "name", "swapped", "shape", "type"],
)
def test_the_tensors_their_names_and_shapes_are_in_it(b: dict[str, torch.Tensor]) -> None:
    assert digest(b) != digest(START["b"])


def test_the_place_in_the_schedule_is_in_it() -> None:
    assert digest(START["b"], (0.9, 1.0)) != digest(START["b"])
