"""A process that runs cells: one JSON line asks for a cell, JSON lines tell how it goes.

    asked     {"source": …, "pairs": [[key, value], …]}
    told      {"event": "StageStarted", …}   each of :mod:`fedstrata.events`, steps at most twice a second
              {"ended": "finished" | "failed", "message": …}

A process of its own, so that a cell that the system kills takes no other with it. It stops when nobody listens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Any, TextIO

from fedstrata.errors import UserError
from fedstrata.events import Event, Stepped
from fedstrata.runs.stages import run_job


def main() -> None:
    """Run the cells asked for on standard input until it ends."""
    signal.signal(signal.SIGTERM, _stop)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    for line in sys.stdin:
        asked = json.loads(line)
        pairs = [(key, value) for key, value in asked["pairs"]]
        try:
            run_job(asked["source"], pairs, resume=True, progress=_Teller(out))
            _say(out, {"ended": "finished", "message": None})
        except UserError as error:
            _say(out, {"ended": "failed", "message": str(error)})
        except BrokenPipeError:
            raise
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            _say(out, {"ended": "failed", "message": f"{type(error).__name__}: {first}".rstrip(": ")})


class _Teller:
    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.last = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            if time.monotonic() - self.last < 0.5:
                return
            self.last = time.monotonic()
        _say(self.out, {"event": type(event).__name__, **dataclasses.asdict(event)})


def _say(out: TextIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
