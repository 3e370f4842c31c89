"""The cells of a sweep: one job per row, grid point and seed.

::

    [sweep]
    seeds = [0, 1, 2]
    parallel = 2
    against = "FedAvg"                            # the row of the paired t-tests

    [sweep.grid]                                  # every combination of these, for every row
    train.learning_rate = [1e-5, 5e-5]

    [[sweep.across]]                              # and every one of these
    name = "biology"
    data = { train = "biology.txt" }

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
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from fedstrata.errors import UserError, did_you_mean, naming
from fedstrata.job.base import Seed, Table
from fedstrata.job.file import Overrides, is_value, load, pairs_of, sweep_table
from fedstrata.job.in_memory import InMemory
from fedstrata.job.sentences import sentence, shown
from fedstrata.job.tables import Job
from fedstrata.methods import METHODS

MOST_CELLS = 10_000


class Sweep(Table):
    """``[sweep]``: what varies over the runs of a job."""

    seeds: list[Seed] = Field([0], min_length=1)
    """No seed stands in it twice."""
    seed: str = "train.seed"
    """The key that the seeds set; ``finetune.train.seed`` varies one stage alone."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Cells that run at the same time, the processor's cores divided among them."""
    against: str | None = None
    """The row with which a paired t-test compares every other, at the same point of ``across`` and ``grid``."""
    keep_models: bool = False
    """Keep the cells' models; otherwise each is removed when no cell needs it any more."""
    rows: list[dict[str, Any]] = Field([])
    """Named settings of any keys: ``name``, and the keys as tables or dotted."""
    across: list[dict[str, Any]] = Field([])
    """Further named settings, such as data sets; every row is run at each of them."""
    grid: dict[str, Any] = Field({})
    """Key -> list of values; every row is run at every combination."""

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"names a seed more than once, found {seeds}")
        return seeds


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        row: the line of the table it belongs to.
        base: the line it is compared with; None where there is none.
        seed: its seed.
        pairs: keys and values laid over the job file, in order.
        folder: its output folder.
        target: the score to which rounds and bytes are counted, of the last stage; None where none is set.
        stages: stage -> a hash of everything that decides the stage's result; equal hashes, equal results.
        jobs: its stages' jobs.
    """

    row: str
    base: str | None
    seed: int
    pairs: tuple[tuple[str, Any], ...]
    folder: Path
    target: float | None
    stages: Mapping[str, str]
    jobs: Sequence[Job] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


def cells(source: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> tuple[Sweep, Path, list[Cell]]:
    """The sweep of a job file, its output folder, and its cells in the table's order; every job is checked.

    Args:
        source: path of a TOML file with a table ``[sweep]``, or its content as a mapping.
        overrides: ``key=value`` words or a mapping, laid over the file and under the rows; ``sweep.…`` keys set
            the sweep's own table.

    Raises:
        UserError: the table or a cell's job is invalid.
    """
    if isinstance(source, Job):
        raise UserError("sweep: found a Job, which is one run; expected a job file, or its content, with [sweep]")
    where, table = sweep_table(source)
    given = list(pairs_of(overrides))
    for key, value in given:
        if key.startswith("sweep."):
            table[key.removeprefix("sweep.")] = value
    given = [pair for pair in given if not pair[0].startswith("sweep.")]
    try:
        sweep = Sweep.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{where}: [sweep] {sentence(error, Sweep, 'sweep')}") from None
    _check_settings(where, sweep, [key for key, _ in given])
    rows = _rows(where, sweep)
    if unknown := next((row.base for row in rows.values() if row.base not in (None, *rows)), None):
        raise UserError(f"{where}: [sweep] against: no row {unknown!r}; {did_you_mean(unknown, rows)}")
    name, first = next(iter(rows.items()))
    base = _jobs(source, name, [*given, *first.pairs])[0]
    if base.between_sites:
        raise UserError(f"{where}: [sweep]: is for one machine; between sites, start its runs one by one")
    folder = Path(base.output.dir)
    places = _folders(rows)
    drafts = [
        _draft(source, name, row.base, seed, (*given, *row.pairs, (sweep.seed, seed)), folder / places[name])
        for name, row in rows.items()
        for seed in sweep.seeds
    ]
    if len(sweep.seeds) > 1 and not f".{sweep.seed}".endswith(".train.seed"):
        raise UserError(f"{where}: [sweep] seed: must be train.seed, or one stage's, found {sweep.seed!r}")
    return sweep, folder, [_cell(draft) for draft in drafts]


def _check_settings(where: str, sweep: Sweep, words: Sequence[str]) -> None:
    """Refuse names and grids that are none, keys that every cell has its own of, and too many cells.

    A seed in the rows, or in the ``words`` that are laid over the file, was taken back by the cell's own.
    """
    for table, settings in (("rows", sweep.rows), ("across", sweep.across)):
        for number, row in enumerate(settings, 1):
            if not isinstance(row.get("name", ""), str):
                raise UserError(f"{where}: [sweep] {table}, entry {number}, name: must be a string")
    axes = dict(_leaves(sweep.grid))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: [sweep.grid] {key}: must be a list of values, found {shown(values)}")
    keys = [*axes, *(key for row in (*sweep.rows, *sweep.across) for key, _ in _leaves(row))]
    if taken := next((key for key in keys if key.endswith("output.dir")), None):
        raise UserError(f"{where}: [sweep] {taken}: every cell has a folder of its own in the sweep's output.dir")
    if taken := next((key for key in (*keys, *words) if f".{key}".endswith(f".{sweep.seed}")), None):
        raise UserError(f"{where}: [sweep] {taken}: every cell has its seed from sweep.seeds; list values there")
    number = math.prod([len(sweep.across) or 1, len(sweep.rows) or 1, len(sweep.seeds), *map(len, axes.values())])
    if number > MOST_CELLS:
        raise UserError(f"{where}: [sweep]: asks for {number:,} runs; expected at most {MOST_CELLS:,}")


@dataclass(frozen=True)
class _Row:
    pairs: list[tuple[str, Any]]
    base: str | None


def _rows(where: str, sweep: Sweep) -> dict[str, _Row]:
    """Row name -> the keys it sets and the row it is compared with, for each point of ``across`` and the grid."""
    axes = dict(_leaves(sweep.grid))
    tails = [key.rpartition(".")[2] for key in axes]
    short = {key: tail if tails.count(tail) == 1 else key for key, tail in zip(axes, tails, strict=True)}
    rows: dict[str, _Row] = {}
    points = itertools.product(sweep.across or [{}], *axes.values())
    for (across, *point), row in itertools.product(points, sweep.rows or [{}]):
        at = dict(zip(axes, point, strict=True))
        suffix = [_name(across), _words({short[key]: value for key, value in at.items()})]
        name = ", ".join(filter(None, [_name(row), *suffix])) or "all"
        if name in rows:
            raise UserError(f"{where}: [sweep] two rows are called {name!r}; every row needs a different name")
        base = sweep.against
        if base is not None and sweep.rows:
            base = ", ".join(filter(None, [base, *suffix]))
        settings = [pair for table in (across, row) for pair in _leaves(table, whole=True) if pair[0] != "name"]
        rows[name] = _Row([*settings, *at.items()], base if base != name else None)
    return rows


def _name(settings: Mapping[str, Any]) -> str:
    return str(settings.get("name", "")) or _words(
        {key: value for key, value in _leaves(settings) if key != "name"}
    )


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value, default=shown)}"
        for key, value in keys.items()
    )


def _leaves(table: Mapping[str, Any], above: str = "", whole: bool = False) -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys, in order; if ``whole`` not into values that are tables themselves."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not (whole and is_value(above + key)):
            yield from _leaves(value, f"{above}{key}.", whole)
        else:
            yield above + key, value


@dataclass(frozen=True)
class _Draft:
    """A cell whose jobs are checked, but not yet resolved for this machine, which imports torch."""

    row: str
    base: str | None
    seed: int
    pairs: tuple[tuple[str, Any], ...]
    folder: Path
    jobs: Sequence[Job]


def _folders(rows: Iterable[str]) -> dict[str, str]:
    """Row -> its folder in the sweep's: no two are the same, not even on disks that take A for a."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for row in rows:
        name = re.sub(r"[^\w.=-]+", "-", row).strip("-.")[:80] or "row"
        longer = [f"{name}-{hashlib.sha256(row.encode()).hexdigest()[:length]}" for length in (6, 12)]
        names = [row, *longer] if name == row else longer
        place = next(one for one in names if one.casefold() not in taken)
        taken.add(place.casefold())
        found[row] = f"cells/{place}"
    return found


def _draft(
    source: str | Path | Mapping[str, Any],
    row: str,
    base: str | None,
    seed: int,
    pairs: Sequence[tuple[str, Any]],
    folder: Path,
) -> _Draft:
    place = folder / f"seed-{seed}"
    pairs = (*pairs, ("output.dir", str(place)))
    return _Draft(row, base, seed, pairs, place, _jobs(source, row, pairs))


def _cell(draft: _Draft) -> Cell:
    from fedstrata.client.setup import resolve_device  # torch, which a mistyped key need not wait for

    with naming(f"row {draft.row!r}"):
        jobs = [resolve_device(job) for job in draft.jobs]
    target = jobs[-1].output.target
    return Cell(draft.row, draft.base, draft.seed, draft.pairs, draft.folder, target, _digests(jobs), jobs)


def _jobs(source: str | Path | Mapping[str, Any], row: str, pairs: Sequence[tuple[str, Any]]) -> list[Job]:
    with naming(f"row {row!r}"):
        jobs = load(source, pairs)
        for job in jobs:
            _check_written(job)
        return jobs


def _check_written(job: Job) -> None:
    """Refuse what the processes of the cells, which get the job as text, would not have."""
    for key in ("train", "test"):
        value = getattr(job.data, key)
        for one in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(one, InMemory):
                raise UserError(
                    f"[data] {key}: found rows in memory ({one.kind}); a sweep reads its rows from files only"
                )
    if type(job.method) not in METHODS.values():
        raise UserError(
            f"[method]: found an object of {type(job.method).__name__}; a sweep's methods are those with a name"
        )


def _digests(jobs: Sequence[Job]) -> dict[str, str]:
    """Stage -> a hash of its job and of the stage that it starts from."""
    digests: dict[str, str] = {}
    for job in jobs:
        tables = {key: value for key, value in job.dump().items() if key != "output"}
        text = json.dumps([tables, digests.get(job.start)], sort_keys=True)
        digests[job.stage] = hashlib.sha256(text.encode()).hexdigest()
    return digests
