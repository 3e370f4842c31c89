"""The second study: a row of each task, named before these runs, against FedAvg with seeds of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from board.cells import Cell, Line
from board.protocol import DENOMINATOR, Group, Protocol
from board.statistics import Equivalence, equivalence, power_no_worse
from board.table import Entry, Table, paired
from fedstrata.reports.sweep import holm


@dataclass(frozen=True)
class Confirmation:
    """What is known of one slice that confirms, with one start model.

    Attributes:
        table: the first study's, of the same task and partition.
        row: the name of the row.
        share: of FedAvg's bytes; None before the first study is whole.
        power: to show "no worse" of a row equal to FedAvg that varies as in the first study; None before that.
        diverged: a run of it did; then there is no test.
        done: seeds that both have run with, none of them diverged.
        scores, base: the last score of each of these seeds, of the row and of FedAvg.
        test: of their differences; None before all seeds are there.
        p: of the test against being worse by the margin, corrected for all slices that confirm (Holm).
        p_equal: of both tests, against either side of the margin, corrected in the same way.
    """

    table: Table
    row: str
    share: float | None = None
    power: float | None = None
    diverged: bool = False
    done: int = 0
    scores: tuple[float, ...] = ()
    base: tuple[float, ...] = ()
    test: Equivalence | None = None
    p: float = 1.0
    p_equal: float = 1.0


def confirmations(
    protocol: Protocol, lines: Sequence[Line], tables: Sequence[Table], facts: Mapping[str, Any]
) -> list[Confirmation]:
    """Every slice that confirms, for each start model of its table.

    Args:
        protocol: names the slices and their seeds.
        lines: of all stages.
        tables: of the first study.
        facts: of each task's rows.
    """
    found = [
        _confirmation(protocol, part, table, lines, facts)
        for part in protocol.slices
        if part.confirms
        for table in tables
        if (table.group.task, table.group.partition) == (part.task, part.partition)
    ]
    # one that has not run counts as not shown, so that the correction does not depend on how many have run
    no_worse = holm([one.test.p_no_worse if one.test else 1.0 for one in found])
    equal = holm([one.test.p if one.test else 1.0 for one in found])
    return [replace(one, p=p, p_equal=both) for one, p, both in zip(found, no_worse, equal, strict=True)]


def _confirmation(
    protocol: Protocol, part: Group, table: Table, lines: Sequence[Line], facts: Mapping[str, Any]
) -> Confirmation:
    row = part.rows[-1].name
    mine, base = table.entry(row), table.entry(DENOMINATOR)
    found = Confirmation(table, row)
    if mine is None or base is None:
        return found
    found = replace(found, share=mine.share, power=_power(protocol, table, mine, base, facts))
    runs = [_runs(entry, table, lines) for entry in (mine, base)]
    both = [{line.cell.seed: line.scores[-1] for line in lines if not line.diverged} for lines in runs]
    seeds = [seed for seed in protocol.seeds_of(True) if all(seed in scores for scores in both)]
    scores, others = (tuple(known[seed] for seed in seeds) for known in both)
    diverged = any(line.diverged for lines in runs for line in lines)
    found = replace(found, diverged=diverged, done=len(seeds), scores=scores, base=others)
    if len(seeds) < len(protocol.seeds_of(True)):
        return found
    differences = paired(table.metric, scores, others)
    return replace(found, test=equivalence(differences, table.margin, protocol.alpha))


def _runs(entry: Entry, table: Table, lines: Sequence[Line]) -> list[Line]:
    """A row's runs in the confirmation, with the rates and rounds that tuning chose."""
    assert entry.tuned is not None
    cell = Cell(table.group.task, table.group.partition, entry.row.name, "confirm", entry.tuned.choice, 0)
    return [line for line in lines if replace(line.cell, seed=0) == cell and line.model == table.model]


def _power(protocol: Protocol, table: Table, mine: Entry, base: Entry, facts: Mapping[str, Any]) -> float | None:
    """Of the one-sided test, with the spread between seeds that the first study showed beyond that of its rows."""
    differences = paired(table.metric, mine.scores, base.scores)
    if len(differences) < 2 or table.group.task not in facts:
        return None
    counts = facts[table.group.task]["rows"]
    rows = sum(count for name, count in counts.items() if name.startswith("fold-"))
    of_row = protocol.planning[table.metric]["row"] ** 2
    between = max(0.0, stdev(differences) ** 2 - of_row / (rows / len(differences)))
    seeds = len(protocol.seeds_of(True))
    error = math.sqrt((between + of_row / (rows / seeds)) / seeds)
    return power_no_worse(table.margin, error, seeds - 1, protocol.alpha)


def shown(protocol: Protocol, found: Confirmation) -> str:
    """The verdict: ``equal`` or ``no worse``, each after the correction, ``worse`` by itself; or how far it is."""
    if found.diverged:
        return "diverged"
    if found.test is None:
        return f"not run: {found.done} of {len(protocol.seeds_of(True))} seeds"
    if found.p_equal < protocol.alpha:
        return "equal"
    if found.p < protocol.alpha:
        return "no worse"
    return "worse" if found.test.verdict == "worse" else "not shown"


def mean_sd(scores: Sequence[float]) -> str:
    """Mean ± standard deviation, as tables print them."""
    return f"{fmean(scores):.4f} ± {stdev(scores):.4f}" if len(scores) > 1 else ""
