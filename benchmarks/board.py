"""The board: score against megabytes of every method, adapter and codec worth it (docs/board.md).

    python benchmarks/board.py --data FOLDER --model FOLDER     # run what is missing; may be killed at any time
    python benchmarks/board.py --data FOLDER --slices 1,2       # of these slices of configs/board/board.toml alone
    python benchmarks/board.py                                  # make the page and its pictures from the figures

A cell's figures are appended to docs/board/TASK.jsonl as soon as it has ended. A killed cell goes on from its last
finished round. Runs and rows are under --work.
"""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType

from board.cells import RECORDS
from board.page import write_page
from board.protocol import Protocol, read_protocol

from fedstrata.errors import UserError


def main() -> None:
    """Run what is missing, then write the page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--data", type=Path, help="folder with the data sets, at any depth; absent: only the page"
    )
    options.add_argument("--model", default="demo:minilm", help="folder of the start model; default: demo:minilm")
    options.add_argument(
        "--slices", default="", help="numbers of slices, such as 1,2; default: all, in their order"
    )
    options.add_argument("--work", type=Path, default=Path("runs/board"), help="folder for rows and runs")
    options.add_argument("--records", type=Path, default=RECORDS, help="folder of the figures, a file per task")
    options.add_argument("--page", type=Path, default=RECORDS.with_suffix(".md"), help="the page")
    chosen = options.parse_args()
    protocol = read_protocol()
    numbers = slice_numbers(chosen.slices, len(protocol.slices))
    failed = run(protocol, numbers, chosen) if chosen.data is not None else 0
    print(f"page  {write_page(protocol, chosen.records, chosen.page)}")
    if failed:
        raise UserError(f"{failed} cells failed; they run again with the next call")


def slice_numbers(text: str, count: int) -> list[int]:
    """The numbers that ``--slices`` names; all where it names none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := next((word for word in words if word not in map(str, range(1, count + 1))), None):
        raise UserError(f"--slices: {wrong!r} is no slice; expected numbers from 1 to {count}, such as 1,2")
    return list(map(int, words)) or list(range(1, count + 1))


def run(protocol: Protocol, numbers: list[int], chosen: argparse.Namespace) -> int:
    """Run slices one after the other, writing the page after each; the number of cells that failed."""
    from board.running import Board

    board = Board(
        protocol,
        chosen.data.resolve(),
        chosen.model,
        chosen.work.resolve(),
        chosen.records,
        partial(print, flush=True),
    )
    for number in numbers:
        part = protocol.slices[number - 1]
        print(f"slice {number}: {part.task}, {part.partition}", flush=True)
        whole = board.run(part)
        write_page(protocol, chosen.records, chosen.page)
        if not whole:
            print(f"the {protocol.hours:g} hours of the protocol are spent")
            break
    return len(board.failed)


def stop(_signal: int, _frame: FrameType | None) -> None:
    """End as with Ctrl-C, so that the processes of running cells first write how far they are."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
