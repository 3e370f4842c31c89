"""Running what is missing: sweeps of single cells, each cell's figures kept as soon as it has ended."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fedstrata
from board import rows
from board.cells import Cell, Line, append, current, figures, hours, read_lines
from board.page import write_facts
from board.protocol import Group, Protocol, Row
from board.tuning import wanted
from fedstrata.data.demo import resolve_model
from fedstrata.errors import UserError
from fedstrata.events import CellEnded
from fedstrata.reports.runs import load_run
from fedstrata.runs.result import read_status
from fedstrata.sweeps.cells import cells as sweep_cells

DIVERGED = re.compile(r"training diverged|loss on the test rows is")
"""What the failure of a run says whose rates were too large."""
ROOT = Path(__file__).resolve().parents[2]


class Board:
    """What the runs of one call have in common.

    Attributes:
        protocol: what is to be run.
        data: the folder of the data sets.
        model: folder of the start model, or ``demo:minilm``.
        work: folder for rows and runs.
        records: folder of the lines.
        say: called with every line for the screen.
    """

    def __init__(
        self,
        protocol: Protocol,
        data: Path,
        model: str,
        work: Path,
        records: Path,
        say: Callable[[str], None] = print,
    ) -> None:
        self.protocol, self.data, self.work, self.records, self.say = protocol, data, work, records, say
        self.folder = resolve_model(model) if model.startswith("demo:") else Path(model)
        self.model = model_words(self.folder)
        self.facts: dict[tuple[str, bool], dict[str, Any]] = {}
        self.failed: set[Cell] = set()
        self.commit = commit()

    def run(self, part: Group) -> bool:
        """Run what a slice lacks; False where the protocol's hours are spent before it is whole."""
        self.rows_of(part.task, part.confirms)
        while cells := self.missing(part):
            if self.hours() >= self.protocol.hours:
                return False
            self.sweep(part, cells)
        return True

    def folder_of(self, task: str, confirms: bool = False) -> Path:
        """Where a task's rows are, with a fold of the test rows for each seed of the tests or the confirmation."""
        return self.work / "data" / (f"{task}-confirm" if confirms else task)

    def rows_of(self, task: str, confirms: bool = False) -> dict[str, Any]:
        """The facts of a task's rows, which are made if they are not there."""
        if (task, confirms) not in self.facts:
            folder, folds = self.folder_of(task, confirms), len(self.protocol.seeds_of(confirms))
            self.facts[task, confirms] = rows.make(task, self.data, folder, folds)
            write_facts(self.records, folder.name, self.facts[task, confirms])
        return self.facts[task, confirms]

    def lines(self, task: str) -> list[Line]:
        """What is known of a task with this call's rows and model."""
        known = current(read_lines(self.records), self.protocol)
        digests = [self.rows_of(task)["digest"], self.facts.get((task, True), {}).get("digest")]
        return [line for line in known if line.rows in digests and line.model == self.model]

    def missing(self, part: Group) -> list[tuple[Cell, Row]]:
        """The cells of a slice that can be run now."""
        lines = self.lines(part.task)
        found = [
            (cell, row)
            for row in part.rows
            for cell in wanted(self.protocol, part.task, part.partition, row, lines, part.confirms)
        ]
        return [(cell, row) for cell, row in found if cell not in self.failed]

    def hours(self) -> float:
        """Clock hours of all cells with this model, as many at a time as the protocol says."""
        known = current(read_lines(self.records), self.protocol)
        return hours([line for line in known if line.model == self.model], self.protocol.parallel)[0]

    def sweep(self, part: Group, cells: Sequence[tuple[Cell, Row]]) -> None:
        """Run cells side by side; those that had begun go on."""
        folder = self.work / "cells" / part.task / hashlib.sha256(self.model.encode()).hexdigest()[:8]
        entries, places = [], {}
        for cell, row in cells:
            facts = self.rows_of(cell.task, cell.stage == "confirm")
            digest = cell.digest(self.protocol, row, facts["digest"], self.model)
            name = f"{cell.stage} {digest}, {cell.name()}, {cell.partition}, seed={cell.seed}"
            test = {"train.seed": cell.seed, "data.test": str(self.test_file(cell))}
            entries.append({"name": name, **cell.keys(self.protocol, row), **test})
            places[name] = (cell, digest)
        job = {**self.protocol.jobs[part.task], "model": {"name": str(self.folder)}}
        job["sweep"] = {"rows": entries, "parallel": self.protocol.parallel}
        # every row has a seed of its own, so the sweep's seeds set another key, to what it is
        job["sweep"] |= {"seed": "engine.threads", "seeds": [job["engine"]["threads"]]}
        keys = {
            "data.train": str(self.folder_of(part.task) / "train.jsonl"),
            "output.dir": str(folder),
            "output.client_models": False,
        }
        found = {str(place): place for place in sweep_cells(job, keys)[2]}

        def progress(event: Any) -> None:
            if isinstance(event, CellEnded):
                place = found[event.cell]
                self.ended(*places[place.row], place.folder, event)
                if self.hours() >= self.protocol.hours:
                    raise Spent

        with suppress(Spent):
            fedstrata.sweep(job, keys, resume=True, progress=progress)
        for place in found.values():  # ended just before an earlier call was killed
            cell, digest = places[place.row]
            if read_status(place.folder) == "finished" and cell not in {
                line.cell for line in self.lines(cell.task)
            }:
                self.keep(cell, digest, place.folder)

    def test_file(self, cell: Cell) -> Path:
        """The rows that a cell is scored on."""
        if cell.stage in ("first", "second"):
            return self.folder_of(cell.task) / "dev.jsonl"
        confirms = cell.stage == "confirm"
        fold = self.protocol.seeds_of(confirms).index(cell.seed)
        return self.folder_of(cell.task, confirms) / f"fold-{fold}.jsonl"

    def ended(self, cell: Cell, digest: str, folder: Path, event: CellEnded) -> None:
        """Keep the figures of a cell, also of one that diverged; one that failed otherwise runs again later."""
        where = f"{cell.task}, {cell.partition}, {cell.stage}: {cell.name()}, seed {cell.seed}"
        if event.status == "finished":
            line = self.keep(cell, digest, folder)
            self.say(f"{where}: {line.scores[-1]:.4f} in {event.seconds:.0f} s")
        elif DIVERGED.search(event.message or ""):
            self.keep(cell, digest, folder, diverged=True)
            self.say(f"{where}: diverged")
        else:
            self.failed.add(cell)
            self.say(f"{where}: failed, {event.message}")

    def keep(self, cell: Cell, digest: str, folder: Path, diverged: bool = False) -> Line:
        """Append a cell's line, and drop what of its folder is no record."""
        run, facts = load_run(folder), self.rows_of(cell.task, cell.stage == "confirm")
        metric = self.protocol.metric(cell.task)
        counts = {"train": facts["rows"]["train"], "scored": facts["rows"][self.test_file(cell).stem]}
        found = figures(run, metric, 0 if diverged else cell.choice.rounds)
        fields = {"digest": digest, "rows": facts["digest"], "model": self.model, "counts": counts}
        line = Line(cell=cell, **fields, **found, diverged=diverged, commit=self.commit)
        append(self.records, line)
        shutil.rmtree(folder / "state", ignore_errors=True)
        return line


class Spent(Exception):
    """The protocol's hours are spent."""


def model_words(folder: Path) -> str:
    """A start model as its shape and a hash of its weights, such as ``bert, 6 layers of 384, 53aa5117``.

    Raises:
        UserError: the folder holds no config or no weights.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        with open(folder / "model.safetensors", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{folder}: is no folder of a model ({error.strerror}: {error.filename})") from None
    return f"{config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, {digest[:8]}"


def commit() -> str:
    """The commit of the code, with a + where files differ from it; empty outside a clone."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()
