"""Successive halving on development rows, from what is known: the cells still missing, or the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from board.cells import Cell, Choice, Line
from board.protocol import Protocol, Row, better


@dataclass(frozen=True)
class Tuned:
    """What tuning chose for a row.

    Attributes:
        choice: the rates, and the number of rounds after which the score on development rows was best.
        score: that score.
        pruned: choices that were dropped, with the best score each reached.
        edge: whether the learning rate is the least or the greatest of the grid.
        last: whether the best round was the last one tried.
    """

    choice: Choice
    score: float
    pruned: tuple[tuple[Choice, float], ...]
    edge: bool
    last: bool


def wanted(
    protocol: Protocol, task: str, partition: str, row: Row, lines: Sequence[Line], confirms: bool = False
) -> list[Cell]:
    """The cells of a row that can be run now: of the first stage of tuning with a cell missing, else of the test.

    Of a row whose partition has its rates from another, that partition's tuning comes first. Of one that is
    confirmed, the confirmation comes after the test.
    """
    known = {line.cell for line in lines}
    home = protocol.tuned(partition)
    first = first_cells(protocol, task, home, row)
    if missing := [cell for cell in first if cell not in known]:
        return missing
    second = second_cells(protocol, task, home, row, lines)
    if missing := [cell for cell in second if cell not in known]:
        return missing
    found = tuned(protocol, task, partition, row, lines)
    if found is None:
        return []  # all of the second stage diverged
    tests = [Cell(task, partition, row.name, "test", found.choice, seed) for seed in protocol.seeds]
    if (missing := [cell for cell in tests if cell not in known]) or not confirms:
        return missing
    again = [replace(tests[0], stage="confirm", seed=seed) for seed in protocol.seeds_of(confirms)]
    return [cell for cell in again if cell not in known]


def first_cells(protocol: Protocol, task: str, partition: str, row: Row) -> list[Cell]:
    """Every learning rate, for a share of the rounds."""
    rounds = max(1, round(full_rounds(protocol, task, row) * protocol.tuning["first_share"]))
    return [
        Cell(
            task,
            partition,
            row.name,
            "first",
            Choice(rate, row.server_rates[0], rounds),
            protocol.tuning["seeds"][0],
        )
        for rate in row.learning_rates
    ]


def second_cells(protocol: Protocol, task: str, partition: str, row: Row, lines: Sequence[Line]) -> list[Cell]:
    """The best learning rates, and the best of all with the other server rates, for all rounds."""
    cells = first_cells(protocol, task, partition, row)
    metric = protocol.metric(task)
    by_cell = {line.cell: line for line in lines}
    order = sorted(cells, key=lambda cell: -better(metric, best_score(metric, by_cell[cell])))
    order = order[: protocol.tuning["keep"]]
    rates = [(cell.choice.learning_rate, row.server_rates[0]) for cell in order]
    rates += [(rates[0][0], server) for server in row.server_rates[1:]]
    rounds, seed = full_rounds(protocol, task, row), protocol.tuning["seeds"][1]
    return [Cell(task, partition, row.name, "second", Choice(*pair, rounds), seed) for pair in rates]


def tuned(protocol: Protocol, task: str, partition: str, row: Row, lines: Sequence[Line]) -> Tuned | None:
    """What tuning chose; None while a cell of it is missing, or where every cell of its second stage diverged."""
    home, metric = protocol.tuned(partition), protocol.metric(task)
    by_cell = {line.cell: line for line in lines}
    first = first_cells(protocol, task, home, row)
    if not all(cell in by_cell for cell in first):
        return None
    second = second_cells(protocol, task, home, row, lines)
    if not all(cell in by_cell for cell in second):
        return None
    points = [
        (better(metric, score), -round, cell)
        for cell in second
        for round, score in enumerate(by_cell[cell].scores)
        if round
    ]
    if not points:
        return None  # all diverged
    best, minus, cell = max(points, key=lambda point: point[:2])  # of equal scores the fewest rounds
    choice = Choice(cell.choice.learning_rate, cell.choice.server_rate, -minus)
    kept = {other.choice.learning_rate for other in second}
    dropped = [other for other in first if other.choice.learning_rate not in kept]
    dropped += [other for other in second if other != cell]
    pruned = tuple((other.choice, best_score(metric, by_cell[other])) for other in dropped)
    edge = choice.learning_rate in (row.learning_rates[0], row.learning_rates[-1])
    return Tuned(choice, better(metric, best), pruned, edge, -minus == cell.choice.rounds)


def best_score(metric: str, line: Line) -> float:
    """The best score that a cell had after any of its rounds; the worst there is, of one that diverged."""
    return better(metric, max((better(metric, score) for score in line.scores[1:]), default=-math.inf))


def full_rounds(protocol: Protocol, task: str, row: Row) -> int:
    """The most rounds that a row may have in a task."""
    return int(protocol.jobs[task]["method"]["rounds"]) * row.rounds


def mean_curve(lines: Sequence[Line]) -> list[float]:
    """The mean score of several seeds of one choice, of the start model and after every round."""
    return [fmean(scores) for scores in zip(*(line.scores for line in lines), strict=True)]
