"""The table of one task and partition: what its figures come to, and nothing where they are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from board.cells import Line
from board.protocol import BOUND, DENOMINATOR, Group, Protocol, Row, better
from board.statistics import Equivalence, equivalence, seeds_needed
from board.tuning import Tuned, first_cells, mean_curve, second_cells, tuned
from fedstrata.reports.sweep import holm

GAINS = (0.95, 0.99)
"""Shares of the centralized gain to which bytes are counted."""


@dataclass(frozen=True)
class Entry:
    """A row of the table. Whatever needs another row is None until that has run.

    Attributes:
        row: which.
        tuning: (cells done, cells in all); of a row whose learning rates are not compared yet, the latter without
            the second stage.
        tuned: what tuning chose; None before.
        lines: of the test, one per seed, in the order of the seeds; those that there are.
        whole: whether all seeds are there, none of them diverged; without that nothing below is told.
        mean, sd: of the scores.
        gain: share of the centralized gain.
        up, down: bytes per client.
        share: of the bytes up and down of tuned FedAvg in fp32.
        flops: of all clients.
        reached: bytes up and down per client until the mean curve first reached each of :data:`GAINS`; or None.
        test: of equality with FedAvg.
        p: of the test, corrected for all rows of the table (Holm).
        seeds: that the test would have needed, had the two been equal with this spread; None: over a hundred.
    """

    row: Row
    tuning: tuple[int, int]
    tuned: Tuned | None
    lines: tuple[Line, ...]
    whole: bool
    mean: float | None = None
    sd: float | None = None
    gain: float | None = None
    up: float | None = None
    down: float | None = None
    share: float | None = None
    flops: float | None = None
    reached: tuple[float | None, ...] | None = None
    test: Equivalence | None = None
    p: float | None = None
    seeds: int | None = None

    @property
    def bytes(self) -> float:
        """Up and down."""
        return (self.up or 0) + (self.down or 0)

    @property
    def scores(self) -> list[float]:
        """The last score of each seed."""
        return [line.scores[-1] for line in self.lines]


@dataclass(frozen=True)
class Table:
    """A group's rows with one start model and one version of the task's rows."""

    group: Group
    model: str
    metric: str
    margin: float
    start: float | None
    """What gains count from: the score of always predicting the most frequent class; for mlm the start model's."""
    entries: tuple[Entry, ...]
    sole_model: bool = False
    """Whether every table that has run starts from this model."""

    @property
    def name(self) -> str:
        """Of its picture."""
        return f"{self.group.task}-{self.group.partition}-{self.model.rpartition(' ')[2]}"

    def entry(self, name: str) -> Entry | None:
        """A row that has run with all its seeds."""
        return next((entry for entry in self.entries if entry.row.name == name and entry.whole), None)

    @property
    def whole(self) -> list[Entry]:
        """The rows that have run with all their seeds."""
        return [entry for entry in self.entries if entry.whole]

    def front(self) -> list[Entry]:
        """Rows that send something, and more than which none scores with as few bytes; by rising bytes."""
        sending = sorted(
            (entry for entry in self.whole if entry.bytes),
            key=lambda entry: (entry.bytes, -better(self.metric, entry.mean or 0)),
        )
        found: list[Entry] = []
        for entry in sending:
            if not found or better(self.metric, entry.mean or 0) > better(self.metric, found[-1].mean or 0):
                found.append(entry)
        return found


def tables(protocol: Protocol, lines: Sequence[Line]) -> list[Table]:
    """Every group's table, for each model and version of rows that it has run with; empty ones without a model."""
    lines = [line for line in lines if line.cell.stage != "confirm"]
    found = []
    for group in protocol.groups():
        home = (group.partition, protocol.tuned(group.partition))
        mine = [line for line in lines if line.cell.task == group.task and line.cell.partition in home]
        kinds = list(dict.fromkeys((line.model, line.rows) for line in mine)) or [("", "")]
        for model, rows in kinds:
            these = [line for line in mine if (line.model, line.rows) == (model, rows)]
            found.append(_table(protocol, group, model, these))
    sole = len({line.model for line in lines}) == 1
    return [replace(table, sole_model=sole) for table in found]


def _table(protocol: Protocol, group: Group, model: str, lines: Sequence[Line]) -> Table:
    metric = protocol.metric(group.task)
    entries = [_entry(protocol, group, row, lines) for row in group.rows]
    by_name = {entry.row.name: entry for entry in entries if entry.whole}
    bound, base = by_name.get(BOUND), by_name.get(DENOMINATOR)
    start = None
    if bound:
        starts = [line.scores[0] if line.baseline is None else line.baseline for line in bound.lines]
        start = fmean(starts)
    if bound and start is not None:
        entries = [_gained(entry, metric, start, bound) for entry in entries]
    if base:
        entries = [_compared(protocol, group.task, entry, base) for entry in entries]
        tested = [entry.test.p for entry in entries if entry.test]
        corrected = iter(holm(tested))
        entries = [replace(entry, p=next(corrected)) if entry.test else entry for entry in entries]
    return Table(group, model, metric, protocol.margin(group.task), start, tuple(entries))


def _entry(protocol: Protocol, group: Group, row: Row, lines: Sequence[Line]) -> Entry:
    """A row by itself."""
    choice = tuned(protocol, group.task, group.partition, row, lines)
    tests = {
        line.cell.seed: line
        for line in lines
        if choice
        and (line.cell.row, line.cell.stage, line.cell.choice) == (row.name, "test", choice.choice)
        and line.cell.partition == group.partition
    }
    mine = tuple(tests[seed] for seed in protocol.seeds if seed in tests)
    whole = len(mine) == len(protocol.seeds) and not any(line.diverged for line in mine)
    entry = Entry(row, _progress(protocol, group, row, lines), choice, mine, whole)
    if not whole:
        return entry
    scores = entry.scores
    return replace(
        entry,
        mean=fmean(scores),
        sd=stdev(scores) if len(scores) > 1 else None,
        up=fmean(line.up[-1] for line in mine),
        down=fmean(line.down[-1] for line in mine),
        flops=fmean(line.flops[-1] for line in mine),
    )


def _progress(protocol: Protocol, group: Group, row: Row, lines: Sequence[Line]) -> tuple[int, int]:
    """How many cells of a row's tuning there are, and how many of them have run."""
    home, known = protocol.tuned(group.partition), {line.cell for line in lines}
    cells = first_cells(protocol, group.task, home, row)
    if all(cell in known for cell in cells):
        cells = cells + second_cells(protocol, group.task, home, row, lines)
    return sum(cell in known for cell in cells), len(cells)


def _gained(entry: Entry, metric: str, start: float, bound: Entry) -> Entry:
    """A row beside the centralized bound."""
    assert bound.mean is not None
    whole = better(metric, bound.mean) - better(metric, start)
    if not entry.whole or entry.mean is None or whole <= 0:
        return entry
    curve = mean_curve(entry.lines)
    spent = [fmean(bytes) for bytes in zip(*(_both(line) for line in entry.lines), strict=True)]
    reached = []
    for share in GAINS:
        wanted = better(metric, start) + share * whole
        rounds = [i for i, score in enumerate(curve) if better(metric, score) >= wanted]
        reached.append(spent[rounds[0]] if rounds else None)
    gain = (better(metric, entry.mean) - better(metric, start)) / whole
    return replace(entry, gain=gain, reached=tuple(reached))


def _both(line: Line) -> list[int]:
    return [up + down for up, down in zip(line.up, line.down, strict=True)]


def _compared(protocol: Protocol, task: str, entry: Entry, base: Entry) -> Entry:
    """A row beside tuned FedAvg in fp32."""
    if not entry.whole:
        return entry
    share = entry.bytes / base.bytes if base.bytes else None
    if entry.row.name in (DENOMINATOR, BOUND):
        return replace(entry, share=share)
    differences = paired(protocol.metric(task), entry.scores, base.scores)
    spread = stdev(differences) if len(differences) > 1 else 0.0
    margin = protocol.margin(task)
    return replace(
        entry,
        share=share,
        test=equivalence(differences, margin, protocol.alpha),
        seeds=seeds_needed(protocol.test_power, spread, margin, protocol.alpha),
    )


def paired(metric: str, scores: Sequence[float], base: Sequence[float]) -> list[float]:
    """The differences of two rows' scores seed by seed, "better" being positive."""
    return [better(metric, score) - better(metric, other) for score, other in zip(scores, base, strict=True)]
