"""Batches: every example once, little padding, the same for the same generator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.data.batching import POOL, batches, token_batches
from fedstrata.plan.kinds import Index
from fedstrata.tasks.batches import pad

LENGTHS = np.random.default_rng(5).integers(3, 128, 1000)


def padded(made: list[Index], lengths: Index = LENGTHS) -> int:
    """Positions computed with."""
    return sum(len(batch) * int(lengths[batch].max()) for batch in made)


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=40),
    size=st.integers(1, 7),
    seed=st.none() | st.integers(0, 3),
    by_length=st.booleans(),
)
def test_every_example_once_in_batches_of_the_size(
    lengths: list[int], size: int, seed: int | None, by_length: bool
) -> None:
    rng = None if seed is None else np.random.default_rng(seed)
    made = batches(np.asarray(lengths, dtype=np.int64), size, rng, by_length)
    assert sorted(int(i) for batch in made for i in batch) == list(range(len(lengths)))
    whole, rest = divmod(len(lengths), size)
    assert sorted(map(len, made), reverse=True) == [size] * whole + [rest] * (rest > 0)


@pytest.mark.parametrize("by_length", [True, False])
def test_the_same_generator_gives_the_same_batches(by_length: bool) -> None:
    one, same, other = (
        [batch.tolist() for batch in batches(LENGTHS, 16, np.random.default_rng(seed), by_length)]
        for seed in (0, 0, 1)
    )
    assert one == same
    assert one != other


def test_without_a_generator_the_order_is_kept() -> None:
    made = batches(np.asarray([5, 1, 4, 2, 3]), 2, None, by_length=False)
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3], [4]]


def test_without_a_generator_the_order_is_that_of_the_lengths() -> None:
    made = batches(np.asarray([5, 1, 4, 1, 3]), 2, None)
    assert [batch.tolist() for batch in made] == [[1, 3], [4, 2], [0]]
    whole = np.concatenate(batches(LENGTHS, 7, None))
    assert (np.diff(LENGTHS[whole]) >= 0).all()


def test_by_length_pads_less_than_random() -> None:
    drawn = padded(batches(LENGTHS, 16, np.random.default_rng(0), by_length=False))
    sorted_in_pools = padded(batches(LENGTHS, 16, np.random.default_rng(0)))
    assert LENGTHS.sum() <= sorted_in_pools < 1.1 * LENGTHS.sum()
    assert drawn > 1.5 * LENGTHS.sum()


def test_batches_do_not_come_short_to_long() -> None:
    made = batches(LENGTHS[:200], 4, np.random.default_rng(0))  # one pool
    means = [float(LENGTHS[batch].mean()) for batch in made]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.4


def test_the_same_examples_do_not_meet_in_every_epoch() -> None:
    rng = np.random.default_rng(0)
    first, second = (
        {(int(a), int(b)) for batch in batches(LENGTHS, 4, rng) for a in batch for b in batch if a < b}
        for _ in range(2)
    )
    assert len(first) == len(second) == 250 * 6
    assert len(first & second) < 0.2 * len(first)


def test_examples_of_equal_length_keep_their_order() -> None:
    """On every processor: numpy's quicker sorts do not."""
    lengths = np.arange(1000) % 2
    assert batches(lengths, 1000, None)[0].tolist() == [*range(0, 1000, 2), *range(1, 1000, 2)]


def test_a_batch_comes_from_one_pool() -> None:
    """Sorting all 300 would put neighbors together, sorting none would put any two: pools of 100 are between."""
    size = 2
    lengths = np.arange(3 * POOL * size)
    made = batches(lengths, size, np.random.default_rng(0))
    apart = [int(batch.max() - batch.min()) for batch in made]
    assert 2 < np.mean(apart) < 4
    assert max(apart) < 60


@settings(max_examples=80)
@given(
    widths=st.lists(st.integers(1, 9), max_size=40),
    budget=st.integers(1, 40),
    seed=st.none() | st.integers(0, 3),
    by_length=st.booleans(),
)
def test_a_budget_is_kept_and_every_example_is_there_once(
    widths: list[int], budget: int, seed: int | None, by_length: bool
) -> None:
    rng = None if seed is None else np.random.default_rng(seed)
    made = token_batches(np.asarray(widths, dtype=np.int64), budget, rng, by_length)
    assert sorted(int(i) for batch in made for i in batch) == list(range(len(widths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(widths[i] for i in batch) <= budget


def test_a_batch_takes_all_that_the_budget_holds() -> None:
    widths = np.asarray([2, 3, 3, 4, 9, 1, 1])
    kept = token_batches(widths, 8, None, by_length=False)
    assert [batch.tolist() for batch in kept] == [[0, 1], [2, 3], [4], [5, 6]]
    by_length = token_batches(widths, 8, None)
    assert [batch.tolist() for batch in by_length] == [[5, 6, 0], [1, 2], [3], [4]]


@pytest.mark.parametrize("by_length", [True, False])
def test_texts_of_one_length_make_the_same_batches_by_count_and_by_budget(by_length: bool) -> None:
    counted = batches(np.full(1000, 12), 5, np.random.default_rng(0), by_length)
    budgeted = token_batches(np.full(1000, 12), 5 * 12 + 11, np.random.default_rng(0), by_length)
    assert [batch.tolist() for batch in counted] == [batch.tolist() for batch in budgeted]


def test_batches_of_a_budget_come_from_random_pools_and_not_short_to_long() -> None:
    made = token_batches(LENGTHS, 512, np.random.default_rng(0))
    drawn = token_batches(LENGTHS, 512, np.random.default_rng(0), by_length=False)
    assert padded(made) < 1.05 * LENGTHS.sum() < 1.3 * LENGTHS.sum() < padded(drawn)
    means = [float(LENGTHS[batch].mean()) for batch in made]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.4
    other = token_batches(LENGTHS, 512, np.random.default_rng(1))
    assert {tuple(sorted(batch)) for batch in made} != {tuple(sorted(batch)) for batch in other}


@pytest.mark.parametrize("size", [1, 100])
def test_sizes_at_the_edges(size: int) -> None:
    made = batches(np.asarray([3, 1, 2]), size, np.random.default_rng(0))
    assert [len(batch) for batch in made] == ([1, 1, 1] if size == 1 else [3])


@pytest.mark.parametrize("rng", [None, np.random.default_rng(0)])
@pytest.mark.parametrize("by_length", [True, False])
def test_nothing_makes_no_batch(rng: np.random.Generator | None, by_length: bool) -> None:
    assert batches(np.empty(0, np.int64), 4, rng, by_length) == []
    assert token_batches(np.empty(0, np.int64), 4, rng, by_length) == []


def test_pad_fills_on_the_right() -> None:
    rows = [np.asarray([7, 8, 9], np.int32), np.asarray([5], np.int32)]
    assert pad(rows, 1).tolist() == [[7, 8, 9], [5, 1, 1]]
    assert pad(rows, 0, 5).tolist() == [[7, 8, 9, 0, 0], [5, 0, 0, 0, 0]]
    assert str(pad(rows, 1).dtype) == "torch.int64"


def test_pad_does_not_cut() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        pad([np.asarray([7, 8, 9], np.int32)], 1, 2)
