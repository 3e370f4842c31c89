"""The worker processes of a sweep, and the locks by which no two processes work on one sweep."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedstrata.engines.machine import all_cores
from fedstrata.errors import UserError
from fedstrata.sweeps.cells import Cell

LOCK = ".lock"
"""In the sweep's folder: held by the process that runs the sweep; each of its workers holds ``.lock-NUMBER``."""
PATIENCE = 60.0
"""Seconds to wait for another process to let go of the sweep."""

Message = dict[str, Any]


@dataclass
class Worker:
    """A process that runs one cell after another; ``cell`` is None while it has none."""

    number: int
    process: subprocess.Popen[str]
    cell: Cell | None = None
    since: float = 0.0

    def start(self, cell: Cell, job: Mapping[str, Any]) -> None:
        """Ask for a cell of a job; that the process has ended instead is heard of as its last message."""
        self.cell, self.since = cell, time.monotonic()
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**job, "pairs": cell.pairs}) + "\n")
            self.process.stdin.flush()


@dataclass
class Workers:
    """The processes of a sweep.

    Attributes:
        folder: the sweep's output folder, which holds their locks and their log.
        parallel: how many there may be at most.
    """

    folder: Path
    parallel: int
    messages: queue.Queue[tuple[int, Message | None]] = field(default_factory=queue.Queue)
    by_number: dict[int, Worker] = field(default_factory=dict)
    listeners: list[threading.Thread] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """What the processes print."""
        return self.folder / "log.txt"

    @property
    def running(self) -> list[Cell]:
        """The cells that are being run."""
        return [worker.cell for worker in self.by_number.values() if worker.cell]

    def idle(self) -> Worker:
        """A worker without a cell: one there is, or a new one."""
        return next((worker for worker in self.by_number.values() if worker.cell is None), None) or self._start()

    def next_message(self) -> tuple[Worker, Message | None]:
        """Wait for the next message of a worker; None says that its process has ended."""
        while True:
            number, message = self.messages.get()
            if number in self.by_number:
                return self.by_number[number], message

    def remove(self, worker: Worker) -> int:
        """Forget a worker whose process has ended; its exit code."""
        del self.by_number[worker.number]
        assert worker.process.stdin
        with contextlib.suppress(OSError):
            worker.process.stdin.close()
        return worker.process.wait()

    def close(self) -> None:
        """End the processes; one in the middle of a cell first writes how far it is."""
        for worker in self.by_number.values():
            assert worker.process.stdin
            with contextlib.suppress(OSError):
                worker.process.stdin.close()
            if worker.cell is not None:
                worker.process.terminate()
        for worker in self.by_number.values():
            try:
                worker.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        for thread in self.listeners:
            thread.join()

    def _start(self) -> Worker:
        """A new process; with several at a time the cores are divided, unless the user did that already."""
        environment = dict(os.environ)
        if self.parallel > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, all_cores() // self.parallel)))
        number = max(self.by_number, default=-1) + 1
        command = [
            sys.executable,
            "-m",
            "fedstrata.sweeps.work",
            f"{self.folder / LOCK}-{number}",
            str(os.getpid()),
        ]
        with self.log.open("a") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=environment,
                start_new_session=True,  # a Ctrl-C is passed on once, in close
            )
        self.by_number[number] = Worker(number, process)
        thread = threading.Thread(target=self._listen, args=(number, process), daemon=True)
        thread.start()
        self.listeners.append(thread)
        return self.by_number[number]

    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self.messages.put((number, json.loads(line)))
        self.messages.put((number, None))


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder, once its last user and all workers of a killed one have let go of it.

    Raises:
        UserError: that takes longer than ``PATIENCE``.
    """
    until = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FileLock(folder / LOCK).acquire(timeout=PATIENCE))
            for path in folder.glob(f"{LOCK}-*"):  # new workers are started only by who holds .lock
                with FileLock(path).acquire(timeout=max(0.0, until - time.monotonic())):
                    pass
        except Timeout:
            raise UserError(f"[output] dir: {folder}: another process is running this sweep") from None
        yield
