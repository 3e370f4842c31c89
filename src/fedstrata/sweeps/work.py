"""A process that runs cells: one JSON line asks for a cell, JSON lines report how it goes.

    in     {"source": …, "base_dir": …, "pairs": [[key, value], …]}
    out    {"event": "StageStarted", …}   each of :mod:`fedstrata.events`, steps at most twice a second
           {"ended": "finished" | "failed", "message": …}

A process of its own, so that a cell that the system kills takes no other with it. It holds a lock as long as it
lives, and stops when nobody listens: of a killed sweep it may be the last to write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from filelock import FileLock

from fedstrata.errors import UserError
from fedstrata.events import Event, Stepped


def main(lock: Path, parent: int) -> None:
    """Run the cells asked for on standard input until it ends.

    Args:
        lock: file to lock while this process lives.
        parent: id of the process that started this one; nothing is run once that has ended.
    """
    signal.signal(signal.SIGTERM, _stop)
    with FileLock(lock, timeout=60):
        if os.getppid() != parent:  # ended before the lock was held, so another may be at the sweep already
            return
        out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever a library prints goes to the log
        for line in sys.stdin:
            _run(json.loads(line), out)


def _run(request: dict[str, Any], out: TextIO) -> None:
    try:
        from fedstrata.runs.job import run_job  # torch: after the lock is held

        pairs = [(key, value) for key, value in request["pairs"]]
        folder = request["base_dir"] and Path(request["base_dir"])
        run_job(request["source"], pairs, resume=True, progress=_Reporter(out), base_dir=folder)
        _send(out, {"ended": "finished", "message": None})
    except UserError as error:
        _send(out, {"ended": "failed", "message": str(error)})
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first}".rstrip(": ")
        if isinstance(error, OSError) and error.filename and error.strerror:  # in the words of a single run
            what = f"{error.filename}: {error.strerror}"
        _send(out, {"ended": "failed", "message": what})


class _Reporter:
    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.last = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            if time.monotonic() - self.last < 0.5:
                return
            self.last = time.monotonic()
        try:
            _send(self.out, {"event": type(event).__name__, **dataclasses.asdict(event)})
        except BrokenPipeError:  # the sweep was killed, so this cell has not failed: it was stopped
            raise KeyboardInterrupt from None


def _send(out: TextIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
