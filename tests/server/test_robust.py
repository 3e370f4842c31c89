"""Robust aggregates against plain references, written out entry by entry and pair by pair."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.server import robust
from fedstrata.server.clip import change_norm, clipped
from fedstrata.server.robust import (
    RobustAggregate,
    RobustSettings,
    StoredReplies,
    TooFewRepliesError,
    far_outside,
)
from full_disk import full_after

NAMES = "abcdefghi"
Vectors = np.ndarray


def merged(rule: str, replies: Vectors, start: Vectors | None = None, **settings: float) -> torch.Tensor:
    """The result of replies ``[n, d]``, each in two tensors."""
    own = np.zeros(replies.shape[1]) if start is None else start
    halves = {"one": slice(0, 3), "two": slice(3, None)}
    aggregate = RobustAggregate(rule, RobustSettings(**settings))  # type: ignore[arg-type]
    aggregate.reference = lambda name: torch.tensor(own[halves[name]], dtype=torch.float32)
    for name, reply in zip(NAMES, replies, strict=False):
        aggregate.add({key: torch.tensor(reply[half]) for key, half in halves.items()}, 10**9, name)
    result = aggregate.result()
    return torch.cat([result["one"], result["two"]])


def drawn(count: int, size: int, seed: int = 0) -> Vectors:
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


def plain_median(x: Vectors, start: Vectors, f: int) -> list[float]:
    return [statistics.median(float(value) for value in column) for column in x.T]


def plain_trimmed(x: Vectors, start: Vectors, f: int) -> list[float]:
    return [statistics.fmean(sorted(map(float, column))[f : len(x) - f]) for column in x.T]


def krum_scores(x: Vectors, f: int) -> list[float]:
    scores = []
    for i, own in enumerate(x):
        others = sorted(math.dist(own, other) ** 2 for j, other in enumerate(x) if j != i)
        scores.append(math.fsum(others[: len(x) - f - 2]))
    return scores


def plain_krum(x: Vectors, start: Vectors, f: int) -> list[float]:
    scores = krum_scores(x, f)
    return x[scores.index(min(scores))].tolist()


def plain_multi_krum(x: Vectors, start: Vectors, f: int) -> list[float]:
    scores = krum_scores(x, f)
    best = sorted(range(len(x)), key=scores.__getitem__)[: len(x) - f]
    return [statistics.fmean(float(x[i, j]) for i in best) for j in range(x.shape[1])]


def plain_centered_clip(
    x: Vectors, start: Vectors, f: int, radius: float | None = None, steps: int = 3
) -> list[float]:
    center = start.astype(np.float64)
    for _ in range(steps):
        away = [own.astype(np.float64) - center for own in x]
        norms = [math.sqrt(math.fsum(value**2 for value in one)) for one in away]
        most = statistics.median(norms) if radius is None else radius
        center = center + sum(one * min(1.0, most / norm) for one, norm in zip(away, norms, strict=True)) / len(x)
    return center.tolist()


PLAIN: dict[str, Callable[[Vectors, Vectors, int], list[float]]] = {
    "median": plain_median,
    "trimmed_mean": plain_trimmed,
    "krum": plain_krum,
    "multi_krum": plain_multi_krum,
    "centered_clip": plain_centered_clip,
}


@pytest.mark.parametrize("rule", PLAIN)
@pytest.mark.parametrize(("count", "malicious"), [(5, 1), (6, 1), (7, 2), (8, 2), (9, 3)])
def test_each_rule_is_its_definition(
    rule: str, count: int, malicious: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust, "PIECE", 16)  # of eleven entries two or three at a time
    for seed in range(5):
        x, start = drawn(count, 11, seed), drawn(1, 11, 99)[0]
        x[:malicious] *= 50
        expected = PLAIN[rule](x, start, malicious)
        found = merged(rule, x, start, malicious=malicious)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("radius", "steps"), [(0.5, 1), (0.5, 5), (100.0, 3)])
def test_centered_clip_has_a_radius_and_steps(radius: float, steps: int) -> None:
    x, start = drawn(6, 9), drawn(1, 9, 5)[0]
    found = merged("centered_clip", x, start, clip_radius=radius, clip_steps=steps)
    np.testing.assert_allclose(found, plain_centered_clip(x, start, 0, radius, steps), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", PLAIN)
@pytest.mark.parametrize("size", [1e3, 1e30, -1e30])
def test_one_bad_reply_of_seven_does_not_decide(rule: str, size: float) -> None:
    x = 1 + drawn(7, 20) / 100
    x[3] *= np.float32(size)
    found = merged(rule, x, np.ones(20))
    assert torch.isfinite(found).all()
    assert (found - 1).abs().max() < 0.03
    mean = torch.tensor(x).double().mean(0)
    assert (mean - 1).abs().max() > 100


def test_a_reply_that_is_chosen_is_the_same_to_the_bit() -> None:
    x = drawn(7, 9)
    x[2:5] = x[2]
    assert merged("krum", x, drawn(1, 9, 3)[0]).tolist() == x[2].tolist()
    assert merged("median", np.stack([x[2]] * 4)).tolist() == x[2].tolist()


def test_the_number_of_examples_plays_no_part() -> None:
    for rule, weight in itertools.product(PLAIN, (1, 10**9)):
        aggregate = RobustAggregate(rule)
        aggregate.reference = lambda name: torch.zeros(1)
        for i, name in enumerate("abcde"):
            aggregate.add({"w": torch.tensor([float(i)])}, weight if i == 4 else 1, name)
        first = aggregate.result()["w"]
        if weight == 1:
            expected = first
        assert torch.equal(first, expected)


def test_parts_are_merged_among_those_that_sent_them() -> None:
    """Three clients have a deep part, five the shallow one; of a part that one sent nothing is merged."""
    aggregate = RobustAggregate("median")
    aggregate.reference = lambda name: torch.zeros(1)
    for i, name in enumerate("abcde"):
        tensors = {"shallow": torch.tensor([float(i)])}
        if i > 1:
            tensors["deep"] = torch.tensor([10.0 * i])
        if i > 3:
            tensors["alone"] = torch.tensor([1.0])
        aggregate.add(tensors, 1, name)
    assert {name: tensor.item() for name, tensor in aggregate.result().items()} == {"shallow": 2.0, "deep": 30.0}
    assert aggregate.unmoved == {"alone": 1}


@pytest.mark.parametrize(
    ("rule", "malicious", "least"),
    [("median", 1, 3), ("trimmed_mean", 2, 5), ("krum", 1, 5), ("multi_krum", 2, 7), ("centered_clip", 1, 3)],
)
def test_with_too_few_replies_there_is_no_result(rule: str, malicious: int, least: int) -> None:
    merged(rule, drawn(least, 9), malicious=malicious)
    with pytest.raises(TooFewRepliesError, match=f"^{least - 1} clients sent the same part.* {least}; "):
        merged(rule, drawn(least - 1, 9), malicious=malicious)
    assert RobustAggregate(rule).result() == {}


def test_who_is_far_outside_is_named_with_how_far() -> None:
    assert far_outside({"a": 1.0, "b": 2.0, "c": 2.0, "d": 6.0}) == {}
    assert far_outside({"a": 1.0, "b": 2.0, "c": 2.0, "d": 6.5}) == {"d": 3.25}
    assert far_outside({"a": 0.0, "b": 0.0, "c": 0.0}) == {}
    assert far_outside({"a": 0.0, "b": 0.0, "c": 1e-9}) == {"c": 1e9}
    aggregate = RobustAggregate("median")
    aggregate.reference = lambda name: torch.zeros(1)
    for name, value in zip("abcde", (1.0, 2.0, 3.0, 4.0, 103.0), strict=True):
        aggregate.add({"w": torch.tensor([value]), "same": torch.zeros(1)}, 1, name)
    aggregate.result()
    assert aggregate.outliers == {"e": 100.0}  # distances 2 1 0 1 100


def test_of_several_sets_of_parts_the_farthest_counts() -> None:
    aggregate = RobustAggregate("median")
    aggregate.reference = lambda name: torch.zeros(1)
    for name, value in zip("abcde", (1.0, 2.0, 3.0, 4.0, 103.0), strict=True):
        deep = {} if name == "a" else {"deep": torch.tensor([value])}
        aggregate.add({"shallow": torch.tensor([value]), **deep}, 1, name)
    aggregate.result()
    assert aggregate.outliers == {"e": 100.0}  # distances 2 1 0 1 100; and in the deep part 1.5 0.5 0.5 99.5


def test_replies_wait_on_the_disk_and_leave_nothing(tmp_path: Path) -> None:
    stored = StoredReplies(tmp_path / "state")
    stored.add({"w": torch.arange(10.0).view(2, 5)}, "a")
    stored.add({"w": -torch.arange(10.0).view(2, 5)}, "b")
    [(begin, rows)] = list(stored.pieces("w"))
    assert (begin, rows.shape) == (0, (2, 10))
    assert rows.tolist() == [list(range(10)), [-float(i) for i in range(10)]]
    assert list((tmp_path / "state").iterdir()) == []
    stored.file.close()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    stored = StoredReplies(tmp_path / "state")
    with full_after(1000), pytest.raises(OSError, match="File too large") as found:
        stored.add({"whole": torch.zeros(500)}, "a")
    assert found.value.filename == str(tmp_path / "state")


def test_a_change_is_clipped_to_a_norm_over_all_that_was_sent() -> None:
    old = {"v": torch.tensor([1.0, 1.0]), "w": torch.tensor([[2.0]])}
    new = {"v": torch.tensor([4.0, 1.0]), "w": torch.tensor([[6.0]])}
    assert change_norm(new, old.__getitem__) == 5.0
    assert clipped(new, old.__getitem__, 5.0, 5.0) is new
    half = clipped(new, old.__getitem__, 5.0, 2.5)
    assert {name: tensor.flatten().tolist() for name, tensor in half.items()} == {"v": [2.5, 1.0], "w": [4.0]}
    huge = {"v": torch.tensor([3e38, -3e38]), "w": torch.tensor([[0.0]])}
    short = clipped(huge, old.__getitem__, change_norm(huge, old.__getitem__), 1.0)
    assert change_norm(short, old.__getitem__) == pytest.approx(1.0, rel=1e-5)
