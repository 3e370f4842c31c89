"""Noise that the clients of a sum share: whole numbers, clipped together, as much as the promise needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_accounting import lower_bound

import fedstrata
from fedstrata.client.private import Private
from fedstrata.errors import UserError
from fedstrata.job.privacy_table import Privacy
from fedstrata.privacy.accounting import Spending, epsilon_of
from fedstrata.privacy.fixed_point import STEP
from fedstrata.privacy.keystream import Keystream
from tiny import train_config

Jobs = Callable[..., dict[str, Any]]
TABLE = {"level": "client", "sum_only": True, "honest": 3, "clip": 0.125, "noise": 2.0}


def summands(changes: dict[str, np.ndarray], rng: np.random.Generator, **keys: Any) -> dict[str, np.ndarray]:
    private = Private(Privacy(**{**TABLE, **keys}), train_config(), lambda request, shared: lambda use: b"")
    return private.summands(changes, STEP, lambda use: rng.bytes(32))


def test_changes_are_clipped_together_in_whole_steps() -> None:
    rng = np.random.default_rng(0)
    changes = {"a": rng.normal(size=5000), "b": np.full(300, 0.3)}
    tiny = {"clip": 0.125, "noise": 1e-3}
    made = summands(changes, rng, **tiny)
    deviation = math.ceil(0.125 * 1e-3 / math.sqrt(3) / STEP) * STEP
    whole = np.concatenate([made["a"], made["b"]])
    np.testing.assert_array_equal(whole / STEP, np.rint(whole / STEP))
    plain = np.concatenate([changes["a"], changes["b"]])
    plain = plain * 0.125 / np.linalg.norm(plain)
    assert np.abs(whole - plain).std() < 1.1 * deviation
    small = {"a": np.full(10, 0.01)}
    assert abs(summands(small, rng, **tiny)["a"].mean() - 0.01) < 4 * deviation


def test_what_is_clipped_and_rounded_is_never_longer_than_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedstrata.client.private.discrete_gaussian", lambda count, deviation, stream: np.zeros(count)
    )
    rng = np.random.default_rng(0)
    for count in (3, 1000, 100_000):
        made = summands({"a": rng.normal(size=count)}, rng, clip=1e-3, noise=10.0)
        assert 0.9e-3 < np.linalg.norm(made["a"]) <= 1e-3


def test_the_noise_is_rounded_up_to_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[int]()

    def draw(count: int, deviation: int, stream: Keystream) -> np.ndarray:
        drawn.append(deviation)
        return np.zeros(count)

    monkeypatch.setattr("fedstrata.client.private.discrete_gaussian", draw)
    summands({"a": np.zeros(3)}, np.random.default_rng(0), noise=1e-3)
    exact = TABLE["clip"] * 1e-3 / math.sqrt(3) / STEP
    assert exact < drawn[0] < exact + 1


def test_the_noise_of_the_honest_together_is_that_of_the_promise() -> None:
    rng, nothing = np.random.default_rng(1), {"a": np.zeros(20_000)}
    total = sum(summands(nothing, rng)["a"] for _ in range(3))
    assert float(np.std(total)) == pytest.approx(2.0 * 0.125, rel=0.02)


def seen(noise: float, tries: int) -> dict[bool, np.ndarray]:
    """Sums of three clients, one of which moves one number by the clip, or is not there but for its noise."""
    rng, nothing = np.random.default_rng(5), {"a": np.zeros(tries)}
    found = {}
    for there in (True, False):
        total = sum(summands(nothing, rng, noise=noise)["a"] for _ in range(3))
        found[there] = total + (0.125 if there else 0.0)
    return found


def test_no_attack_on_the_sum_beats_the_claim() -> None:
    """And with a third of the noise one does, so that the test can fail."""
    claim = epsilon_of([Spending(1.5, 1.0, 1)], 1e-3, "rdp")
    found = lower_bound(seen(1.5, 100_000), 1e-3)
    assert 0.3 * claim < found < claim
    assert lower_bound(seen(0.5, 100_000), 1e-3) > claim


def test_a_run_tells_the_promise_of_its_sums(job: Jobs) -> None:
    made = job("fedavg", "classify", task={"labels": ["eye", "heart", "kidney"]}, privacy=TABLE)
    before = fedstrata.forecast(made)["fedavg"]
    result = fedstrata.run(made)
    assert before["privacy"] == result.privacy
    assert result.privacy["epsilon"] == epsilon_of([Spending(2.0, 1.0, 2)], 1e-5, "rdp")
    assert (result.privacy["honest"], result.privacy["accountant"]) == (3, "rdp")
    assert result.bytes["up"] == before["clients"]["up_bytes"]
    settled = fedstrata.forecast(
        {**made, "privacy": {**{k: v for k, v in TABLE.items() if k != "noise"}, "epsilon": 6.0}}
    )["fedavg"]
    assert 5.9 < settled["privacy"]["epsilon"] <= 6.0


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"clip": 1.0}, "deviation 1.15 to every weight; a masked sum takes"),
        ({"clip": 3.0, "noise": 0.1}, "deviation 0.173 over it a number may be beyond 4"),
        ({"honest": 4}, "a sum of fewer than 4 clients is not opened"),
        ({"sum_only": False}, "goes with level = 'client' and sum_only = true"),
    ],
)
def test_what_the_sum_cannot_hold_is_refused(
    job: Jobs, tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    made = job("fedavg", "classify", task={"labels": ["eye", "heart", "kidney"]}, privacy={**TABLE, **keys})
    for played in (fedstrata.forecast, fedstrata.run):
        with pytest.raises(UserError, match=sentence):
            played(made)
    assert not list((tmp_path / "run").glob("rounds.jsonl"))
