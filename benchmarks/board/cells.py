"""The cells of the board: one run each, and what is kept of it, a line of figures."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from board.protocol import BOUND, Protocol, Row
from fedstrata.reports.runs import Run

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "board"
"""Where the lines are, a file per task."""


@dataclass(frozen=True)
class Choice:
    """One point of a row's grid: rates, and rounds."""

    learning_rate: float
    server_rate: float
    rounds: int


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task, partition, row: where on the board.
        stage: ``first`` or ``second`` of the tuning, on development rows; ``test``; or ``confirm``, with other
            seeds and the test rows in as many folds.
        choice: its rates and rounds.
        seed: its seed.
    """

    task: str
    partition: str
    row: str
    stage: str
    choice: Choice
    seed: int

    def name(self) -> str:
        """Its folder's name below the stage's."""
        c = self.choice
        return f"{self.row}, lr={c.learning_rate:g}, server={c.server_rate:g}, rounds={c.rounds}"

    def keys(self, protocol: Protocol, row: Row) -> dict[str, Any]:
        """Dotted job keys over the task's job, without places of files."""
        steps = protocol.jobs[self.task]["train"]["steps"]
        keys = {
            "clients.count": protocol.clients,
            **{f"clients.{key}": value for key, value in protocol.partitions[self.partition]["clients"].items()},
            **row.set,
            "train.learning_rate": self.choice.learning_rate,
            "method.rounds": self.choice.rounds,
        }
        if self.choice.server_rate != 1.0:
            keys["server.learning_rate"] = self.choice.server_rate
        if self.row == BOUND:
            keys["train.steps"] = steps * protocol.clients
        return keys

    def digest(self, protocol: Protocol, row: Row, rows: str, model: str) -> str:
        """What decides its result: equal digests, equal figures (on one kind of machine)."""
        job = {key: value for key, value in protocol.jobs[self.task].items() if key not in ("output", "model")}
        content = [job, self.keys(protocol, row), self.stage, self.seed, rows, model]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Line:
    """What is kept of a cell; no text of any row is in it.

    Attributes:
        cell: which.
        digest: :meth:`Cell.digest`.
        rows: the hash of the task's rows.
        model: what the clients started from, as its shape and the hash of its weights.
        counts: rows for training and for this score.
        scores: the headline metric of the start model and after every round.
        up, down: bytes per client, all of its rounds up to each round; without the initial download.
        flops: of all clients and the server, up to each round.
        baseline: score of always predicting the most frequent class; None for a task without labels.
        seconds: of the run's rounds.
        diverged: its loss was not finite; then it has no scores after those of the start model.
        commit: of the code.
    """

    cell: Cell
    digest: str
    rows: str
    model: str
    counts: Mapping[str, int]
    scores: Sequence[float]
    up: Sequence[int]
    down: Sequence[int]
    flops: Sequence[int]
    baseline: float | None
    seconds: float
    diverged: bool
    commit: str


def figures(run: Run, metric: str, rounds: int) -> dict[str, Any]:
    """The fields of a :class:`Line` that a finished run's records hold."""
    spent: dict[str, dict[int, int]] = {"up": defaultdict(int), "down": defaultdict(int)}
    for entry in run.transfers:
        spent[entry["direction"]][max(0, entry["round"])] += entry["bytes"]
    flops: dict[int, int] = defaultdict(int)
    for line in run.work:
        flops[max(0, line["round"])] += line["flops"] + line.get("server_flops", 0)
    by_round = {line["round"]: line["score"][metric] for line in run.rounds if line["client"] == "server"}
    count = max(1, len(run.clients))
    baseline = run.result.get("baseline")
    return {
        "scores": [by_round[i] for i in range(-1, rounds)],
        **{way: [total // count for total in _sums(spent[way], rounds)] for way in spent},
        "flops": _sums(flops, rounds),
        "baseline": baseline["score"][metric] if baseline else None,
        "seconds": round(float(run.result["seconds"]), 3),
    }


def _sums(by_round: Mapping[int, int], rounds: int) -> list[int]:
    total, found = 0, [0]
    for i in range(rounds):
        total += by_round.get(i, 0)
        found.append(total)
    return found


def append(folder: Path, line: Line) -> None:
    """Add a line to its task's file in one write; half a line that a killed write left is dropped first."""
    path = folder / f"{line.cell.task}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    if whole and not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with open(path, "ab") as file:
        file.write(json.dumps(asdict(line), ensure_ascii=False).encode() + b"\n")


def read_lines(folder: Path) -> list[Line]:
    """Every whole line of the files in a folder, in their order; of equal digests the last."""
    found: dict[str, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text("utf-8").splitlines(keepends=True):
            if text.endswith("\n"):
                data = json.loads(text)
                cell = data["cell"]
                line = Line(**{**data, "cell": Cell(**{**cell, "choice": Choice(**cell["choice"])})})
                found[line.digest] = line
    return list(found.values())


def current(lines: Sequence[Line], protocol: Protocol) -> list[Line]:
    """The lines whose cell is still the protocol's: same job, rows of the board and grid."""
    rows = {(group.task, group.partition, row.name): row for group in protocol.groups() for row in group.rows}
    found = []
    for line in lines:
        cell = line.cell
        row = rows.get((cell.task, cell.partition, cell.row))
        if row and line.digest == cell.digest(protocol, row, line.rows, line.model):
            found.append(line)
    return found


def hours(lines: Sequence[Line], parallel: int) -> tuple[float, float]:
    """Clock hours of cells, so many at a time, and what they would be at the speed of the fastest of each kind.

    A kind is a task, row and stage: each stage scores other rows.
    """
    rounds = [max(1, len(line.scores) - 1) for line in lines]  # of one that diverged those before it did
    kinds = [(line.cell.task, line.cell.row, line.cell.stage) for line in lines]
    fastest: dict[tuple[str, str, str], float] = {}
    for line, kind, count in zip(lines, kinds, rounds, strict=True):
        fastest[kind] = min(line.seconds / count, fastest.get(kind, math.inf))
    spent = sum(line.seconds for line in lines)
    least = sum(count * fastest[kind] for kind, count in zip(kinds, rounds, strict=True))
    return spent / 3600 / parallel, least / 3600 / parallel
