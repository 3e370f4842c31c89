"""A sample of ``make schedules``: whatever happens on the way, runs come to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedules


@pytest.mark.parametrize("number", range(10))
def test_runs_over_a_bad_network_end_in_the_same_bits(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each number at least as many runs as are asked for; Hypothesis plays about 200 in all."""
    counts = schedules.play(tmp_path, 15, 30, monkeypatch, number)
    runs = [counts[f"runs {which}"] for which in ("with everybody in every round", "without some in some rounds")]
    assert sum(runs) >= 15
    assert all(runs)
    assert sum(count for what, count in counts.items() if not what.startswith("runs")) > 100
    assert counts["the server starts again"] > 0
