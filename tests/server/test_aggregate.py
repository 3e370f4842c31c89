"""Aggregates against hand-computed values."""

from __future__ import annotations

import pytest
import torch

from fedstrata.errors import UserError
from fedstrata.server.aggregate import AGGREGATES, make_aggregate
from fedstrata.server.mean import WeightedMean


def test_mean_golden() -> None:
    weighted, uniform = WeightedMean(), WeightedMean()
    for value, examples in ((1.0, 1), (3.0, 3)):
        weighted.add({"w": torch.tensor([value])}, examples, "a")
        uniform.add({"w": torch.tensor([value])}, 1, "a")
    assert weighted.result()["w"].item() == 2.5
    assert uniform.result()["w"].item() == 2.0


def test_mean_of_one_is_exact_and_tensors_are_averaged_over_those_that_sent_them() -> None:
    value = torch.rand(1000)
    mean = WeightedMean()
    mean.add({"both": value, "first": value}, 7, "a")
    mean.add({"both": value * 3}, 14, "b")
    result = mean.result()
    assert torch.equal(result["first"], value)
    torch.testing.assert_close(result["both"], value * 7 / 3)


def test_the_mean_is_taken_in_fp64_and_does_not_depend_on_the_order_of_small_whole_weights() -> None:
    """Sixteen clients, each with 24 bits of mantissa and a count: exact in fp64, so no order changes a bit."""
    generator = torch.Generator().manual_seed(0)
    replies = [(torch.rand(100, generator=generator) + 1, 2**i) for i in range(16)]
    orders = (replies, replies[::-1], replies[8:] + replies[:8])
    results = []
    for order in orders:
        mean = WeightedMean()
        for value, weight in order:
            mean.add({"w": value}, weight, "a")
        results.append(mean.result()["w"])
    exact = sum(value.double() * weight for value, weight in replies) / (2**16 - 1)
    assert all(torch.equal(result, exact.float()) for result in results)
    naive = sum(value * weight for value, weight in replies) / (2**16 - 1)
    assert not torch.equal(naive, exact.float()), "in fp32 it would not be"


def test_nobody_sent_anything() -> None:
    assert WeightedMean().result() == {}


def test_what_comes_out_is_fp32_and_what_went_in_is_untouched() -> None:
    value = torch.tensor([1.0, 2.0])
    mean = WeightedMean()
    mean.add({"w": value}, 5, "a")
    result = mean.result()["w"]
    assert result.dtype == torch.float32
    result.add_(1)
    assert value.tolist() == [1.0, 2.0]


def test_an_aggregate_is_one_class_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Largest(WeightedMean):
        pass

    monkeypatch.setitem(AGGREGATES, "largest", Largest)  # type: ignore[arg-type]
    assert isinstance(make_aggregate("largest")(), Largest)
    assert isinstance(make_aggregate("mean")(), WeightedMean)
    with pytest.raises(UserError, match=r"\[server\] aggregate: 'larges' .*largest"):
        make_aggregate("larges")
