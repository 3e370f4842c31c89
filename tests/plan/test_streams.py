"""Streams: one per (seed, round, client, use), the same on every machine, independent of each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedstrata.plan.streams import Streams

HERE = (0, "client-1", "order")


def test_a_stream_starts_anew_at_every_call() -> None:
    streams = Streams(0)
    first = streams.numpy(*HERE).random(5)
    streams.numpy(1, "client-1", "order").random(100)
    assert streams.numpy(*HERE).random(5).tolist() == first.tolist()
    assert Streams(0).numpy(*HERE).random(5).tolist() == first.tolist()


def test_the_draws_are_fixed_for_all_time() -> None:
    """Figures of earlier runs stay reproducible: whoever changes these breaks them."""
    assert Streams(0).integer(0, "client-1", "order") == 6070890659097031933
    assert Streams(0).numpy(0, "client-1", "order").integers(0, 1000, 5).tolist() == [662, 885, 264, 861, 470]


@pytest.mark.parametrize(
    "other", [Streams(1).numpy(*HERE), Streams(0).numpy(1, *HERE[1:]), Streams(0).numpy(0, "client-2", "order")]
)
def test_every_coordinate_counts(other: np.random.Generator) -> None:
    assert other.random(5).tolist() != Streams(0).numpy(*HERE).random(5).tolist()


def test_use_counts() -> None:
    assert Streams(0).integer(0, "a", "order") != Streams(0).integer(0, "a", "batch")


def test_no_two_streams_share_a_seed() -> None:
    names = ("1", "11", "a", "server")
    made = [
        Streams(seed).integer(round, client, use)
        for seed, round, client, use in itertools.product((0, 1, 11), (-1, 0, 1, 11, 111), names, names)
    ]
    assert len(set(made)) == len(made)


def test_integers_have_63_bits() -> None:
    made = [Streams(0).integer(round, "a", "b") for round in range(500)]
    assert all(0 <= number < 2**63 for number in made)
    assert max(made) > 0.9 * 2**63
    assert 0.45 < np.mean(np.asarray(made, dtype=float) / 2**63) < 0.55


def test_neighboring_streams_are_uncorrelated() -> None:
    table = np.asarray([Streams(0).numpy(round, "a", "b").random(400) for round in range(30)])
    apart = np.corrcoef(table)[~np.eye(30, dtype=bool)]
    assert np.abs(apart).max() < 0.25  # 5 standard deviations of 1 / sqrt(400)
    assert abs(np.corrcoef(table.T[0][:-1], table.T[0][1:])[0, 1]) < 0.6


def test_no_global_generator_is_touched() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    Streams(0).numpy(*HERE).random(5)
    assert (np.random.get_state()[1] == before).all()
