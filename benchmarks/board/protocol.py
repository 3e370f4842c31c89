"""The protocol: what is compared, tuned and claimed, from ``configs/board/board.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "board"
DENOMINATOR = "FedAvg"
"""The row with whose bytes all are compared, and whose scores they are to equal."""
BOUND = "centralized"
"""The row whose gain is the whole gain."""
LOWER = ("loss",)
"""Metrics of which less is better."""


@dataclass(frozen=True)
class Row:
    """A method with its adapter and codec.

    Attributes:
        name: in the table.
        set: dotted job keys -> values.
        learning_rates: the grid, rising.
        server_rates: the same; the first is used while learning rates are compared.
        rounds: at most so many times the task's rounds.
    """

    name: str
    set: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    server_rates: tuple[float, ...]
    rounds: int = 1


@dataclass(frozen=True)
class Group:
    """A task, how its rows are dealt to the clients, and the rows of the table in their order.

    Of one that ``confirms``, the rows run again with the seeds of the confirmation once their tests are there.
    """

    task: str
    partition: str
    rows: tuple[Row, ...]
    confirms: bool = False


@dataclass(frozen=True)
class Protocol:
    """All of it; the attributes are the file's own."""

    clients: int
    seeds: tuple[int, ...]
    alpha: float
    test_power: float
    hours: float
    parallel: int
    margins: Mapping[str, float]
    planning: Mapping[str, Mapping[str, float]]
    tuning: Mapping[str, Any]
    confirmation: Mapping[str, Any]
    partitions: Mapping[str, Mapping[str, Any]]
    slices: tuple[Group, ...]
    jobs: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Task -> the content of its job file."""

    def metric(self, task: str) -> str:
        """The headline metric of a task."""
        return str(self.jobs[task]["task"]["metric"])

    def margin(self, task: str) -> float:
        """The margin of equivalence of a task."""
        return self.margins[self.metric(task)]

    def seeds_of(self, confirms: bool) -> tuple[int, ...]:
        """The seeds of the tests, or those of the confirmation; each has a fold of the test rows."""
        return tuple(self.confirmation["seeds"]) if confirms else self.seeds

    def tuned(self, partition: str) -> str:
        """The partition whose development rows choose the rates: itself, or the one that it names."""
        return str(self.partitions[partition].get("tuned", partition))

    def groups(self) -> list[Group]:
        """The slices, those of the same task and partition together."""
        found: dict[tuple[str, str], dict[str, Row]] = {}
        for part in self.slices:
            found.setdefault((part.task, part.partition), {}).update({row.name: row for row in part.rows})
        return [Group(task, partition, tuple(rows.values())) for (task, partition), rows in found.items()]


def read_protocol(folder: Path = FOLDER) -> Protocol:
    """The protocol in a folder: ``board.toml``, and a job ``TASK.toml`` for each of its tasks.

    Raises:
        UserError: a slice names a task, row or partition that there is not, or the first row of a task's table is
            not there.
    """
    table = tomllib.loads((folder / "board.toml").read_text("utf-8"))
    rows = {name: _row(name, values) for name, values in table.pop("rows").items()}
    slices = tuple(_slice(number, entry, rows, table) for number, entry in enumerate(table.pop("slices"), 1))
    jobs = {
        part.task: tomllib.loads((folder / f"{part.task}.toml").read_text("utf-8"))
        for part in slices
        if (folder / f"{part.task}.toml").exists()
    }
    if missing := next((part.task for part in slices if part.task not in jobs), None):
        raise UserError(f"{folder}: there is no job {missing}.toml for the task {missing!r}")
    return Protocol(**{**table, "seeds": tuple(table["seeds"]), "slices": slices, "jobs": jobs})


def _row(name: str, values: Mapping[str, Any]) -> Row:
    return Row(
        name,
        dict(leaves(values["set"])),
        tuple(values["learning_rates"]),
        tuple(values["server_rates"]),
        values.get("rounds", 1),
    )


def _slice(number: int, entry: Mapping[str, Any], rows: Mapping[str, Row], table: Mapping[str, Any]) -> Group:
    if unknown := next((name for name in entry["rows"] if name not in rows), None):
        raise UserError(f"board.toml: slice {number}: there is no row {unknown!r}")
    if entry["partition"] not in table["partitions"]:
        raise UserError(f"board.toml: slice {number}: there is no partition {entry['partition']!r}")
    named = tuple(rows[name] for name in entry["rows"])
    confirms = entry.get("confirm", False)
    if confirms and (len(named) != 2 or named[0].name != DENOMINATOR):
        raise UserError(f"board.toml: slice {number}: expected {DENOMINATOR} and the row that is confirmed")
    return Group(entry["task"], entry["partition"], named, confirms)


def leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys, in order."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def better(metric: str, score: float) -> float:
    """A score as a number of which more is better."""
    return -score if metric in LOWER else score
