"""The tables of a job as Python may give them, for type checkers and editors alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Required, TypedDict

from fedstrata.job.base import Table
from fedstrata.plan.plan import Method

GivenTable = Table | Mapping[str, Any]
"""A table as an object, or as in a job file."""


class Given(TypedDict, total=False):
    """The fields of :class:`fedstrata.job.tables.Job`."""

    stage: str
    start: str
    model: GivenTable | None
    task: Required[GivenTable]
    data: Required[GivenTable]
    clients: GivenTable
    method: Required[Method | Mapping[str, Any]]
    train: GivenTable
    head: GivenTable
    adapter: GivenTable
    server: GivenTable
    wire: GivenTable
    client: GivenTable
    privacy: GivenTable
    engine: GivenTable
    track: GivenTable
    output: GivenTable
