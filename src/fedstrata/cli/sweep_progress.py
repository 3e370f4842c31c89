"""Live progress of a sweep: a bar over all cells and one per running cell, and lines above them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import TaskID

from fedstrata.cli.common import check_stopped
from fedstrata.cli.progress import Live
from fedstrata.cli.words import round_words, score_lines
from fedstrata.events import (
    CellEnded,
    CellEvent,
    CellStarted,
    Event,
    Noted,
    RoundEnded,
    Scored,
    StageEnded,
    StageStarted,
    Stepped,
)
from fedstrata.reports.times import duration, left_words, time_left


@dataclass
class Running:
    """A running cell: its bar, and its stage."""

    bar: TaskID
    stage: StageStarted | None = None


class SweepDisplay(Live):
    """Shows the events of a sweep: one bar over all cells, and what each running cell is at."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.began = time.monotonic()
        self.before: int | None = None  # cells that were over when this call began
        self.over = self.count = 0
        self.running: dict[str, Running] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        check_stopped()
        match event:
            case CellStarted():
                self._started(event)
            case CellEvent(cell, inner):
                self._cell_event(cell, self.running[cell], inner)
            case CellEnded():
                self._ended(event)

    def _started(self, event: CellStarted) -> None:
        self.before = event.over if self.before is None else self.before
        self.over, self.count = event.over, event.count
        self.bar.update(self.line, description="cells", total=event.count, completed=event.over)
        self.running[event.cell] = Running(self.add(event.cell, None))
        self.log(f"{event.cell}: started, cell {event.number + 1} of {event.count}")

    def _ended(self, event: CellEnded) -> None:
        self.over += 1
        self.bar.remove_task(self.running.pop(event.cell).bar)
        before = self.before or 0
        left = time_left(self.began, self.over - before, self.count - before)
        self.bar.update(self.line, completed=self.over, left=left)
        done = f"{self.over} of {self.count} cells done" + (f", {left}" if left else "")
        why = f": {event.message}" if event.message else ""
        self.log(f"{event.cell}: {event.status} after {duration(event.seconds)}; {done}{why}")

    def _cell_event(self, cell: str, running: Running, event: Event) -> None:
        stage = running.stage
        match event:
            case StageStarted():
                running.stage = event
                self.bar.update(running.bar, total=event.rounds, completed=event.done)
            case Stepped(round) if stage:
                place = round_words(round, stage.rounds)
                self.bar.update(running.bar, description=f"{cell}  {stage.stage} {place}  loss {event.loss:.3f}")
            case RoundEnded(round, left) if stage:
                text = left_words(left)
                self.bar.update(running.bar, completed=round + 1, left=text)
                if round + 1 < stage.rounds:
                    self.log_if_silent(f"{cell}: {round_words(round, stage.rounds)} done, {text}")
            case Scored(round, score) if stage:
                for line in score_lines(round, score, stage.rounds, stage.baseline):
                    self.log(": ".join(filter(None, [cell, stage.stage, line])))
            case Noted(sentence):
                self.log(f"{cell}: note: {sentence}")
            case StageEnded(name, True):
                self.log(f"{cell}: {name} was finished by another cell or before")
