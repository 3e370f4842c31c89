"""A small public text over the tiny tokenizer's words, and jobs that are audited against it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from tiny import words

Audited = Callable[..., dict[str, Any]]


@pytest.fixture
def public(tmp_path: Path) -> str:
    """A file with 120 texts of random words."""
    draw, known = random.Random(0), [word for word in words() if word != "."]
    path = tmp_path / "public.csv"
    lines = [" ".join(draw.choices(known, k=draw.randint(4, 12))) + "." for _ in range(120)]
    path.write_text("text\n" + "\n".join(lines) + "\n", "utf-8")
    return str(path)


@pytest.fixture
def audited(job: Callable[..., dict[str, Any]], public: str) -> Audited:
    """Audits a small job: the one stage's record."""

    def audit(name: str, kind: str, /, *, whose: str | None = None, **tables: Any) -> dict[str, Any]:
        made = job(name, kind, 3, **tables)
        [stage] = fedstrata.audit(made, client=whose, public=public)["stages"]
        found: dict[str, Any] = stage
        return found

    return audit
