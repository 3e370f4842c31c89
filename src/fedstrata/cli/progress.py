"""Live progress of a run: a bar on a terminal, a line per answer in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedstrata.events import (
    CellEnded,
    CellStarted,
    CellTold,
    Encoded,
    Event,
    Missed,
    Replied,
    Scored,
    StageEnded,
    StageStarted,
    Stepped,
    Waiting,
)


class _Live:
    """A bar that lives as long as its ``with`` block, and lines above it."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.line = self.bar.add_task("preparing", total=None)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def _log(self, line: str) -> None:
        self.bar.console.print(line, soft_wrap=True, markup=False)


class Display(_Live):
    """Shows the events of a run; called with each."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bytes = 0
        self.seen = 0
        self.since = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if not isinstance(event, Stepped):
            self.since = time.monotonic()  # whatever was told before, the next client starts now
        match event:
            case StageStarted():
                self._started(event)
            case Stepped():
                self._stepped(event)
            case Encoded(done, total):
                self.bar.update(self.line, description=f"encoded {done} of {total} texts")
            case Replied():
                self.bytes = event.bytes
                self.answered += 1
                rate = f"{self.seen / max(event.seconds, 1e-9):.0f} examples/s" if self.seen else ""
                told = f"{event.seconds:.1f} s"  # from afar nothing is heard of single steps
                self._log(
                    f"round {event.round}  {event.client}  loss {event.loss:.4f}  {rate or told}  "
                    f"{event.bytes / 1e6:.1f} MB so far"
                )
                self.bar.update(self.line, completed=self.answered)
            case Missed(round, client, reason):
                self._log(f"{f'round {round}' if round >= 0 else 'start'}  {client}  {reason}")
            case Waiting(clients, seconds):
                until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
                self._log(f"waiting for {', '.join(clients)} to connect, until {until} at most")
            case Scored():
                scores = "  ".join(f"{name} {value:.4f}" for name, value in event.score.items())
                place = f"round {event.round}" if event.round >= 0 else "start"
                self._log(f"{place}  score  {scores}")
            case StageEnded(stage, reused):
                if reused:
                    self._log(f"{stage or 'this job'}: finished before, not run again")
                self.bar.reset(self.line, description="preparing", total=None)

    def _started(self, event: StageStarted) -> None:
        self.event = event
        self.answered = 0
        self.bytes = 0
        name = f"{event.stage}: " if event.stage else ""
        examples = sum(event.clients.values())
        self._log(
            f"{name}{event.method}, {event.rounds} rounds, {len(event.clients)} clients, {examples} examples"
        )
        for note in event.notes:
            self._log(f"note: {note}")
        if event.done:
            self._log(f"going on after {event.done} finished rounds")
        self.bar.reset(self.line, total=float((event.rounds - event.done) * len(event.clients)))

    def _stepped(self, event: Stepped) -> None:
        self.seen = event.examples
        rate = event.examples / max(time.monotonic() - self.since, 1e-9)
        text = (
            f"round {event.round} of {self.event.rounds}  {event.client} loss {event.loss:.3f} "
            f"{rate:.0f}/s {self.bytes / 1e6:.1f} MB"
        )
        self.bar.update(self.line, description=text, completed=self.answered + event.step / event.steps)


class SweepDisplay(_Live):
    """Shows the events of a sweep: one bar over all cells, and what each running cell is at."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.ended = 0
        self.running: dict[str, tuple[TaskID, StageStarted | None]] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case CellStarted(cell, number, of):
                self.bar.update(self.line, description="cells", total=of)
                self.running[cell] = (self.bar.add_task(cell, total=None), None)
                self._log(f"{cell}: begins, cell {number + 1} of {of}")
            case CellTold(cell, told):
                self._told(cell, told)
            case CellEnded(cell, status, message, seconds):
                self.ended += 1
                self.bar.remove_task(self.running.pop(cell)[0])
                self.bar.update(self.line, completed=self.ended)
                self._log(f"{cell}: {status} after {seconds:.0f} s" + (f": {message}" if message else ""))

    def _told(self, cell: str, event: Event) -> None:
        task, stage = self.running[cell]
        match event:
            case StageStarted():
                self.running[cell] = task, event
                self.bar.update(task, total=event.rounds * len(event.clients), completed=event.done)
            case Stepped() if stage:
                text = f"{cell}  {stage.stage} round {event.round} of {stage.rounds}  loss {event.loss:.3f}"
                self.bar.update(task, description=text)
            case Replied():
                self.bar.advance(task)
            case Scored() if stage:
                scores = "  ".join(f"{name} {value:.4f}" for name, value in event.score.items())
                place = f"round {event.round}" if event.round >= 0 else "start"
                self._log(": ".join(filter(None, [cell, stage.stage, f"{place}  {scores}"])))
            case StageEnded(name, True):
                self._log(f"{cell}: {name} was made by another cell or before")
