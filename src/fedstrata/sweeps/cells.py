"""The cells of a sweep: one job per row, grid point and seed.

::

    [sweep]
    seeds = [0, 1, 2]
    parallel = 2
    against = "FedAvg"                            # the row of the paired t-tests

    [sweep.grid]                                  # every combination of these, for every row
    train.learning_rate = [1e-5, 5e-5]

    [[sweep.rows]]
    name = "FedAvg"
    pretrain.method = { name = "fedavg" }

    [[sweep.rows]]
    name = "FedBFPT"
    pretrain.method = { name = "fedbfpt", local_layers = 6 }
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job import Job, Positive, Table
from fedstrata.jobfile import Overrides, load, pairs_of, sentence, sweep_table
from fedstrata.ready import settle


class Sweep(Table):
    """``[sweep]``: what varies over the runs of a job."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    seed: str = "train.seed"
    """The key that the seeds set; ``finetune.train.seed`` varies one stage alone."""
    parallel: Positive = 1
    """Cells run side by side, the processor's cores divided among them."""
    against: str | None = None
    """The row with which a paired t-test compares every other."""
    keep_models: bool = False
    """Keep the cells' models; else each goes when no cell needs it any more."""
    grid: dict[str, Any] = Field({})
    """Key -> list of values; every combination is run."""
    rows: list[dict[str, Any]] = Field([])
    """Named settings of any keys: ``name``, and the keys as tables or dotted."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        row: the line of the table it belongs to.
        seed: its seed.
        pairs: keys and values laid over the job file, in order.
        folder: its output folder.
        stages: stage -> a hash of everything that decides the stage's result; equal hashes, equal results.
    """

    row: str
    seed: int
    pairs: tuple[tuple[str, Any], ...]
    folder: Path
    stages: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


def cells(source: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> tuple[Sweep, Path, list[Cell]]:
    """The sweep of a job file, its output folder, and its cells in the table's order; every job is checked.

    Args:
        source: path of a TOML file with a table ``[sweep]``, or its content as a mapping.
        overrides: ``key=value`` words or a mapping, laid over the file and under the rows; ``sweep.…`` keys set
            the sweep's own table.

    Raises:
        UserError: the table is not legal, or a cell's job is not.
    """
    where, table = sweep_table(source)
    given = list(pairs_of(overrides))
    for key, value in given:
        if key.startswith("sweep."):
            table[key.removeprefix("sweep.")] = value
    given = [pair for pair in given if not pair[0].startswith("sweep.")]
    try:
        sweep = Sweep.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{where}: [sweep] {sentence(error, Sweep)}") from None
    rows = _rows(where, sweep)
    if sweep.against is not None and sweep.against not in rows:
        raise UserError(f"{where}: [sweep] against: no row {sweep.against!r}; {did_you_mean(sweep.against, rows)}")
    row, pairs = next(iter(rows.items()))
    folder = Path(_jobs(source, row, [*given, *pairs])[0].output.dir)
    made = [
        _cell(source, row, seed, (*given, *pairs, (sweep.seed, seed)), folder)
        for row, pairs in rows.items()
        for seed in dict.fromkeys(sweep.seeds)
    ]
    return sweep, folder, made


def _rows(where: str, sweep: Sweep) -> dict[str, list[tuple[str, Any]]]:
    """Row name -> the keys it sets: each named row, at each point of the grid."""
    axes = dict(_leaves(sweep.grid))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: [sweep.grid] {key}: must be a list of values, found {values!r}")
    tails = [key.rpartition(".")[2] for key in axes]
    short = {key: tail if tails.count(tail) == 1 else key for key, tail in zip(axes, tails, strict=True)}
    rows: dict[str, list[tuple[str, Any]]] = {}
    for row in sweep.rows or [{"name": ""}]:
        own = [(key, value) for key, value in _leaves(row) if key != "name"]
        for point in itertools.product(*axes.values()):
            at = dict(zip(axes, point, strict=True))
            words = [str(row.get("name", "")) or _words(dict(own)), _words({short[k]: v for k, v in at.items()})]
            name = ", ".join(word for word in words if word) or "all"
            if name in rows:
                raise UserError(f"{where}: [sweep] two rows are called {name!r}; give each a name of its own")
            rows[name] = [*own, *at.items()]
    return rows


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()
    )


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys, in order."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def _cell(
    source: str | Path | Mapping[str, Any], row: str, seed: int, pairs: Sequence[tuple[str, Any]], folder: Path
) -> Cell:
    name = re.sub(r"[^\w.=-]+", "-", row).strip("-.") or "row"
    tag = "" if name == row else "-" + hashlib.sha256(row.encode()).hexdigest()[:6]
    place = folder / "cells" / f"{name[:80]}{tag}" / f"seed-{seed}"
    pairs = (*pairs, ("output.dir", str(place)))
    return Cell(row, seed, pairs, place, _digests(_jobs(source, row, pairs)))


def _jobs(source: str | Path | Mapping[str, Any], row: str, pairs: Sequence[tuple[str, Any]]) -> list[Job]:
    try:
        return [settle(job) for job in load(source, pairs)]
    except UserError as error:
        raise UserError(f"row {row!r}: {error}") from None


def _digests(jobs: Sequence[Job]) -> dict[str, str]:
    made: dict[str, str] = {}
    for job in jobs:
        decides = {key: value for key, value in job.dump().items() if key != "output"}
        text = json.dumps([decides, made.get(job.start)], sort_keys=True)
        made[job.stage] = hashlib.sha256(text.encode()).hexdigest()
    return made
