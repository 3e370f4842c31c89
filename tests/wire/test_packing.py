"""Codes and sets of places as bytes: what goes in comes out, of a size known before, and nothing else is read."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from fedstrata.wire.packing import (
    code_bytes,
    pack_codes,
    pack_places,
    place_bytes,
    unpack_codes,
    unpack_places,
)

QUICK = settings(max_examples=100)


@QUICK
@given(bits=some.sampled_from([1, 2, 4, 8]), codes=some.lists(some.integers(0, 255), max_size=50))
def test_codes_come_back(bits: int, codes: list[int]) -> None:
    sent = torch.tensor([code % 2**bits for code in codes], dtype=torch.uint8)
    packed = pack_codes(sent, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == code_bytes(len(codes), bits)
    assert torch.equal(unpack_codes(packed, len(codes), bits), sent)


def test_codes_by_hand() -> None:
    assert pack_codes(torch.tensor([1, 2, 3, 0, 3], dtype=torch.uint8), 2).tolist() == [0b00111001, 0b11]
    assert pack_codes(torch.tensor([1, 0, 1], dtype=torch.uint8), 1).tolist() == [0b101]


@QUICK
@given(total=some.integers(1, 3000), seed=some.integers(0, 99), share=some.floats(0, 1))
def test_places_come_back(total: int, seed: int, share: float) -> None:
    count = max(1, round(share * total))
    places = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    packed = pack_places(places, total)
    assert len(packed) == place_bytes(total, count), "the same for every set of so many"
    assert unpack_places(packed, count, total).tolist() == places.tolist()


@pytest.mark.parametrize("density", [0.3, 0.1, 0.01, 0.001])
def test_places_take_little_more_than_the_fewest_bits(density: float) -> None:
    total = 1_000_000
    count = round(density * total)
    fewest = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    assert fewest < 8 * place_bytes(total, count) / count < fewest + 0.7
    assert place_bytes(total, count) <= total / 8, "a bitmap is never longer"


@pytest.mark.parametrize(("total", "count"), [(64, 40), (1000, 30)])
def test_bytes_that_are_no_set_of_places_are_refused(total: int, count: int) -> None:
    """One bit more or less, two equal places, a place beyond the last."""
    good = pack_places(np.arange(count) * (total // count), total)
    for value in (0, 255):
        bad = good.clone()
        bad[-1] ^= value ^ (1 if value == 0 else 0)
        with pytest.raises(ValueError, match="places"):
            unpack_places(bad, count, total)
    places = np.arange(count) * (total // count)
    places[1] = places[0]
    if place_bytes(total, count) < total / 8:
        with pytest.raises(ValueError, match="ascending"):
            unpack_places(pack_places(places, total), count, total)
        with pytest.raises(ValueError, match="ascending"):
            unpack_places(pack_places(np.append(np.arange(count - 1), total), total), count, total)


@pytest.mark.parametrize(("total", "count"), [(64, 40), (1000, 30)])
def test_whatever_is_read_is_a_set_of_places(total: int, count: int) -> None:
    good, draw, refused = pack_places(np.arange(count), total), random.Random(0), 0
    for _ in range(500):
        bad = good.clone()
        bad[draw.randrange(len(bad))] = draw.randrange(256)
        try:
            places = unpack_places(bad, count, total)
        except ValueError:
            refused += 1
        else:
            assert len(set(places.tolist())) == count
            assert 0 <= min(places) <= max(places) < total
    assert 100 < refused < 500
