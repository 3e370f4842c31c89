"""A sample of ``make schedules``: whatever happens on the way, runs come to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedules


def test_runs_over_a_bad_network_end_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = schedules.play(tmp_path, 8, 30, monkeypatch)
    assert sum(count for what, count in counts.items() if not what.startswith("runs")) > 100
    assert counts["runs with everybody in every round"] > 0
    assert counts["runs without some in some rounds"] > 0
    assert counts["the server starts again"] > 0
