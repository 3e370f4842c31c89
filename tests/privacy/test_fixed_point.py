from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.privacy.fixed_point import (
    MOST_WEIGHT,
    RANGE,
    STEP,
    FixedPoint,
    SaturationError,
    capped,
    fixed_point,
)

LIMIT = st.floats(-RANGE, RANGE, allow_nan=False)
VALUES = st.lists(LIMIT, min_size=5, max_size=5)
ROWS = st.lists(st.tuples(st.integers(1, 1 << 20), VALUES), min_size=1, max_size=9)


@given(ROWS)
@settings(max_examples=200)
def test_the_sum_is_that_of_python_integers_and_the_mean_is_half_a_step_away_at_most(
    rows: list[tuple[int, list[float]]],
) -> None:
    total = sum(weight for weight, _ in rows)
    fixed = fixed_point(total)
    words = np.zeros(5, np.uint64)
    for weight, values in rows:
        packed = fixed.pack(fixed.weighted(fixed.integers(np.array(values)), weight))
        assert len(packed) == 5 * fixed.width
        words += fixed.unpack(packed)
    plain = [sum(w * round(v[i] / STEP) for w, v in rows) for i in range(5)]  # Python's own integers
    assert fixed.signed(words).tolist() == plain
    exact = np.array([sum(w * v[i] for w, v in rows) / total for i in range(5)])
    assert np.abs(fixed.mean(words, total) - exact).max() <= STEP / 2 * (1 + 1e-9) + 1e-15


@pytest.mark.parametrize(("total", "width"), [(1, 4), (31, 4), (33, 5), (8000, 5), (9000, 6), (1 << 40, 0)])
def test_the_width_is_the_least_that_holds_the_sum(total: int, width: int) -> None:
    if not width:
        with pytest.raises(SaturationError, match="64 bits"):
            fixed_point(total)
        return
    fixed = fixed_point(total)
    assert fixed.width == width
    assert fixed.bound * STEP >= RANGE
    assert fixed.bound * total < 1 << (8 * width - 1)


def test_the_largest_values_of_all_clients_together_do_not_wrap() -> None:
    fixed = fixed_point(7)
    for sign in (1.0, -1.0):
        own = fixed.integers(np.array([sign * fixed.bound * STEP]))
        assert fixed.signed(fixed.unpack(fixed.pack(fixed.weighted(own, 7)))).item() == sign * 7 * fixed.bound


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30, "beyond"])
def test_what_cannot_be_encoded_is_refused_and_not_wrapped(value: float | str) -> None:
    fixed = fixed_point(100)
    number = (fixed.bound + 1) * STEP if value == "beyond" else float(value)
    with pytest.raises(SaturationError, match="beyond"):
        fixed.integers(np.array([0.0, number]))
    fixed.integers(np.array([fixed.bound * STEP]))


def test_halves_go_to_even_and_the_weight_has_a_cap() -> None:
    fixed = FixedPoint(4, 0.5, 100)
    assert fixed.integers(np.array([0.25, 0.75, -0.25, 1.0])).tolist() == [0, 2, 0, 2]
    assert capped(5) == 5
    assert capped(1 << 30) == MOST_WEIGHT
