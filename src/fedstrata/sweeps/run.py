"""Running a sweep: cells in turn or side by side, each stage's result made once, a failing cell survived."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata import events
from fedstrata.errors import UserError
from fedstrata.events import CellEnded, CellStarted, CellTold
from fedstrata.job.file import Overrides
from fedstrata.reports.sweep import Entry, write_tables
from fedstrata.runs.folder import check_output_dir
from fedstrata.runs.result import link, read_status
from fedstrata.sweeps.cells import Cell, Sweep, cells

Tell = Callable[[events.Event], None]
FAILED = "failed.txt"
"""In the folder of a cell that failed: why."""


def run_sweep(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    resume: bool = False,
    progress: Tell | None = None,
) -> list[Entry]:
    """See :func:`fedstrata.sweep`."""
    sweep, folder, made = cells(source, overrides)
    check_output_dir(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder) as lock:
        run = _Run(sweep, made, source, progress or (lambda event: None), folder / "log.txt", lock)
        run.play()
    return write_tables(folder, made, sweep.against)


@dataclass
class _Worker:
    """A process that runs one cell after another."""

    number: int
    process: subprocess.Popen[str]
    cell: Cell | None = None
    since: float = 0.0


@dataclass
class _Run:
    sweep: Sweep
    cells: Sequence[Cell]
    source: str | Path | Mapping[str, Any]
    tell: Tell
    log: Path
    lock: int
    heard: queue.Queue[tuple[int, dict[str, Any] | None]] = field(default_factory=queue.Queue)
    workers: dict[int, _Worker] = field(default_factory=dict)
    listeners: list[threading.Thread] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    """Hashes of the stages that running cells have finished."""

    def play(self) -> None:
        """Run every cell that is not finished; those that failed before are tried again."""
        waiting = [cell for cell in self.cells if read_status(cell.folder) != "finished"]
        try:
            while waiting or any(worker.cell for worker in self.workers.values()):
                while (cell := self._next(waiting)) is not None:
                    waiting.remove(cell)
                    self._start(cell)
                number, said = self.heard.get()
                if number in self.workers:
                    self._hear(self.workers[number], said)
        finally:
            self._close()

    def _next(self, waiting: Sequence[Cell]) -> Cell | None:
        """The first cell none of whose stages is just being made by another; None while all hands are full."""
        running = [worker.cell for worker in self.workers.values() if worker.cell]
        if len(running) >= self.sweep.parallel:
            return None
        busy = {digest for cell in running for digest in cell.stages.values()} - self.made
        return next((cell for cell in waiting if not busy & set(cell.stages.values())), None)

    def _start(self, cell: Cell) -> None:
        for stage, digest in cell.stages.items() if len(cell.stages) > 1 else ():
            self._share(cell, stage, digest)
        (cell.folder / FAILED).unlink(missing_ok=True)
        worker = next((w for w in self.workers.values() if w.cell is None), None) or self._hire()
        worker.cell, worker.since = cell, time.monotonic()
        self.tell(CellStarted(str(cell), self.cells.index(cell), len(self.cells)))
        source = str(self.source) if isinstance(self.source, Path) else self.source
        assert worker.process.stdin
        with contextlib.suppress(BrokenPipeError):  # its end is heard of anyway
            worker.process.stdin.write(json.dumps({"source": source, "pairs": cell.pairs}) + "\n")
            worker.process.stdin.flush()

    def _share(self, cell: Cell, stage: str, digest: str) -> None:
        """Give a cell another's finished stage, if there is one with the same hash and with its model."""
        target = cell.folder / "stages" / stage
        if read_status(target) == "finished":
            return
        for other in self.cells:
            for name, same in other.stages.items():
                found = other.folder / "stages" / name
                there = read_status(found) == "finished" and (found / "model").exists()
                if there and (name, same) == (stage, digest):
                    half = target.with_name(f".{stage}.part")
                    for path in (target, half):
                        shutil.rmtree(path, ignore_errors=True)
                    shutil.copytree(found, half, copy_function=link)
                    os.replace(half, target)
                    return

    def _hear(self, worker: _Worker, said: dict[str, Any] | None) -> None:
        cell = worker.cell
        if said is None:
            assert worker.process.stdin
            code = worker.process.wait()
            del self.workers[worker.number]
            with contextlib.suppress(OSError):
                worker.process.stdin.close()
            if cell is None:
                return
            said = {"ended": "failed", "message": f"its process ended with code {code}; see {self.log}"}
        assert cell is not None
        if "ended" not in said:
            event: Any = getattr(events, said.pop("event"))(**said)
            if isinstance(event, events.StageEnded):
                self.made.add(cell.stages[event.stage])
            self.tell(CellTold(str(cell), event))
            return
        worker.cell = None
        if said["message"]:
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / FAILED).write_text(said["message"] + "\n", encoding="utf-8")
        self._drop_models()
        self.tell(CellEnded(str(cell), said["ended"], said["message"], time.monotonic() - worker.since))

    def _hire(self) -> _Worker:
        """A new process; with several side by side the cores are divided, unless the user did that already."""
        environment = dict(os.environ)
        if self.sweep.parallel > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self.sweep.parallel)))
        number = max(self.workers, default=-1) + 1
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedstrata.sweeps.work"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=environment,
                pass_fds=[self.lock],
                start_new_session=True,  # a Ctrl-C is passed on once, in _close
            )
        self.workers[number] = _Worker(number, process)
        thread = threading.Thread(target=self._listen, args=(number, process), daemon=True)
        thread.start()
        self.listeners.append(thread)
        return self.workers[number]

    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self.heard.put((number, json.loads(line)))
        self.heard.put((number, None))

    def _drop_models(self) -> None:
        """Remove models that no unfinished cell can start from."""
        if self.sweep.keep_models:
            return
        needed = {
            digest
            for cell in self.cells
            if read_status(cell.folder) != "finished"
            for digest in cell.stages.values()
        }
        for cell in self.cells:
            for stage, digest in cell.stages.items():
                if digest not in needed:
                    for name in ("start", "model"):
                        shutil.rmtree(cell.folder / "stages" / stage / name, ignore_errors=True)
            if read_status(cell.folder) == "finished":
                for name in ("start", "model"):
                    shutil.rmtree(cell.folder / name, ignore_errors=True)

    def _close(self) -> None:
        """End the processes; one in the middle of a cell first writes how far it is."""
        for worker in self.workers.values():
            assert worker.process.stdin
            with contextlib.suppress(OSError):
                worker.process.stdin.close()
            if worker.cell is not None:
                worker.process.terminate()
        for worker in self.workers.values():
            try:
                worker.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        for thread in self.listeners:
            thread.join()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """A lock on the folder, held by this process and its workers: a killed sweep's last worker may still write.

    Raises:
        UserError: it is not free within a minute.
    """
    with (folder / ".lock").open("a") as file:
        for _ in range(60):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(1)
        else:
            raise UserError(f"[output] dir: {folder}: another process is running this sweep")
        yield file.fileno()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
