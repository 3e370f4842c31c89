"""The table of attacks in ``docs/results/reliability.md`` names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_attack_that_the_page_lists_has_its_test() -> None:
    page = (ROOT / "docs" / "results" / "reliability.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 25
    lacking = [name for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text("utf-8")]
    assert lacking == []
