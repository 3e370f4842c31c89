"""A job from Python, as type checkers and editors see it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import get_args, get_type_hints

from fedstrata.job import given, tables


def test_every_table_of_a_job_may_be_given_as_in_a_job_file() -> None:
    hints = get_type_hints(given.Given, vars(given), vars(tables))
    assert list(hints) == list(tables.Job.model_fields)
    for name, hint in hints.items():
        assert name in ("stage", "start") or any(issubclass(kind, Mapping) for kind in _kinds(hint)), name


def _kinds(hint: object) -> list[type]:
    return [kind for one in get_args(hint) if inspect.isclass(kind := getattr(one, "__origin__", one))]
