"""Live progress of a run: a bar on a terminal, a line per answer in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedstrata.events import Event, Replied, Scored, StageEnded, StageStarted, Stepped


class Display:
    """Shows the events of a run; called with each."""

    def __init__(self, console: Console) -> None:
        self.console = console
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
        self.bytes = 0
        self.seen = 0
        self.since = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if not isinstance(event, Stepped):
            self.since = time.monotonic()  # whatever was told before, the next client starts now
        match event:
            case StageStarted():
                self._started(event)
            case Stepped():
                self._stepped(event)
            case Replied():
                self.bytes = event.bytes
                self.answered += 1
                rate = self.seen / max(event.seconds, 1e-9)
                self._log(
                    f"round {event.round}  {event.client}  loss {event.loss:.4f}  {rate:.0f} examples/s  "
                    f"{event.bytes / 1e6:.1f} MB so far"
                )
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

    def _log(self, line: str) -> None:
        self.bar.console.print(line, soft_wrap=True, markup=False)
