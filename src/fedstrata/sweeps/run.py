"""Running a sweep: cells one by one or in parallel, each stage's result made once, a failing cell survived."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata import events
from fedstrata.events import CellEnded, CellEvent, CellStarted
from fedstrata.job.file import Overrides, content_of
from fedstrata.models.folders import FILES
from fedstrata.plan.kinds import PAGE
from fedstrata.reports.sweep import FAILED, SweepRow
from fedstrata.reports.sweep_files import drop_table, write_table
from fedstrata.runs.folder import check_output_dir, mark
from fedstrata.runs.result import read_status
from fedstrata.server.state import newest_commit
from fedstrata.sweeps.begun import check_cells
from fedstrata.sweeps.cells import Cell, Sweep, cells
from fedstrata.sweeps.workers import Message, Worker, Workers, sole_user
from fedstrata.wire.files import clear, copy_folder, link, write_bytes

Progress = Callable[[events.Event], None]
MODELS = ("start", "model", "shared", "clients", "adapter", "base")
"""Folders of a stage that hold models."""
OWN_PARTS = ("round-[0-9]*.safetensors",)
"""Files below ``state/clients`` of the parts that a client keeps, which are most of its model."""


def run_sweep(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[SweepRow]:
    """See :func:`fedstrata.sweep`."""
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else None
    source = content_of(source)  # once: whoever changes the file meanwhile has the next sweep in mind
    sweep, folder, found = cells(source, overrides)
    check_output_dir(folder, resume, "sweep")
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder, "sweep")
    with sole_user(folder):
        if not resume:  # another process may have begun, and ended, since this one looked
            check_output_dir(folder / "cells", resume=False)
        over = check_cells(found, base_dir)
        for cell in over:
            (cell.folder / FAILED).unlink(missing_ok=True)  # more rounds failed, and are not asked for any more
        places = {cell.folder for cell in over}
        waiting = [cell for cell in found if cell.folder not in places]
        if waiting:
            drop_table(folder)
        tell = progress or (lambda event: None)
        asked = {"source": source, "base_dir": base_dir and str(base_dir)}
        _Scheduler(sweep, found, waiting, asked, tell, Workers(folder, sweep.parallel)).run()
        return write_table(folder, found, sweep.against)


@dataclass
class _Scheduler:
    sweep: Sweep
    cells: Sequence[Cell]
    waiting: list[Cell]
    """Cells that are to be run and have not begun to."""
    job: Mapping[str, Any]
    """What a worker is told of every cell's job: its content, and the folder of the file that it was read from."""
    progress: Progress
    workers: Workers
    finished_stages: set[str] = field(default_factory=set)
    """Hashes of the stages that running cells have finished."""
    over: int = 0
    """Cells that have ended, now or in an earlier call."""

    def run(self) -> None:
        """Run every cell that is not over; those that failed before are tried again."""
        self.over = len(self.cells) - len(self.waiting)
        try:
            while self.waiting or self.workers.running:
                while (cell := self._next()) is not None:
                    self.waiting.remove(cell)
                    self._start(cell)
                worker, message = self.workers.next_message()
                self._receive(worker, message)
        finally:
            self.workers.close()

    def _next(self) -> Cell | None:
        """The first cell none of whose stages is being computed by another; None while all workers are busy."""
        running = self.workers.running
        if len(running) >= self.sweep.parallel:
            return None
        busy = {digest for cell in running for digest in cell.stages.values()} - self.finished_stages
        return next((cell for cell in self.waiting if not busy & set(cell.stages.values())), None)

    def _start(self, cell: Cell) -> None:
        mark(cell.folder)
        for stage, digest in cell.stages.items() if len(cell.stages) > 1 else ():
            self._share(cell, stage, digest)
        for name in (FAILED, PAGE):  # a page is kept by its time, which a clock that was set back makes newer
            (cell.folder / name).unlink(missing_ok=True)
        worker = self.workers.idle()
        self.progress(CellStarted(str(cell), self.cells.index(cell), len(self.cells), self.over))
        worker.start(cell, self.job)

    def _share(self, cell: Cell, stage: str, digest: str) -> None:
        """Give a cell that has not begun a stage another's, finished, with the same hash and with its model."""
        target = cell.folder / "stages" / stage
        if target.exists():
            return
        for other in self.cells:
            for name, same in other.stages.items():
                found = other.folder / "stages" / name
                whole = any((found / kind).exists() for kind in ("model", "shared"))
                usable = whole and read_status(found) == "finished"
                if usable and (name, same) == (stage, digest):
                    half = target.with_name(f".{stage}.part")
                    shutil.rmtree(half, ignore_errors=True)
                    copy_folder(found, half, _taken_over)
                    os.replace(half, target)
                    return

    def _receive(self, worker: Worker, message: Message | None) -> None:
        cell = worker.cell
        if message is None:
            code = self.workers.remove(worker)
            if cell is None:
                return
            message = {"ended": "failed", "message": f"its process ended with code {code}; see {self.workers.log}"}
        assert cell is not None
        if "ended" not in message:
            event: Any = getattr(events, message.pop("event"))(**message)
            if isinstance(event, events.StageEnded):
                self.finished_stages.add(cell.stages[event.stage])
            self.progress(CellEvent(str(cell), event))
            return
        worker.cell = None
        self.over += 1
        if message["message"]:
            write_bytes(cell.folder / FAILED, f"{message['message']}\n".encode())
        self._drop_models()
        seconds = time.monotonic() - worker.since
        self.progress(CellEnded(str(cell), message["ended"], message["message"], seconds))

    def _drop_models(self) -> None:
        """Remove models that no unfinished cell can start from."""
        if self.sweep.keep_models:
            return
        going = {cell.folder for cell in (*self.waiting, *self.workers.running)}  # some finished, for more rounds
        unfinished = [
            cell for cell in self.cells if cell.folder in going or read_status(cell.folder) != "finished"
        ]
        needed = {digest for cell in unfinished for digest in cell.stages.values()}
        for cell in self.cells:
            if any(path.is_symlink() for path in (cell.folder, *cell.folder.parents[:2])):
                continue  # what it leads to may be another sweep's
            folders = [
                cell.folder / "stages" / name for name, digest in cell.stages.items() if digest not in needed
            ]
            if cell not in unfinished:
                folders.append(cell.folder)
            for folder in folders:
                for name in MODELS:
                    clear(folder / name, FILES)
                if not _kept_state(folder):
                    clear(folder / "state" / "clients", OWN_PARTS)


def _taken_over(source: str, target: str) -> None:
    """A second name for a file; of records, which more rounds add to where they are, a copy."""
    (shutil.copy2 if source.endswith(".jsonl") else link)(source, target)


def _kept_state(folder: Path) -> bool:
    """Whether a finished stage has kept its state, as ``output.keep_state`` asks, and can get more rounds."""
    return bool((newest_commit(folder) or {}).get("kept"))
