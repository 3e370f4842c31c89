"""Live progress of a run: a bar on a terminal, a line per reply in a log. Rounds count from 1."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedstrata.errors import plural
from fedstrata.events import (
    Baseline,
    CellEnded,
    CellEvent,
    CellStarted,
    Counted,
    Encoded,
    Event,
    Missed,
    Noted,
    Replied,
    Scored,
    StageEnded,
    StageStarted,
    Stepped,
    Waiting,
)
from fedstrata.plan.kinds import LOWER_IS_BETTER


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

    def _log(self, *lines: str) -> None:
        for line in lines:
            self.bar.console.print(line, soft_wrap=True, markup=False)


class Display(_Live):
    """Shows the events of a run; called with each."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.rounds = 0
        self.baseline = Baseline()
        self.replies = 0
        self.bytes = 0
        self.training: dict[str, tuple[float, Stepped]] = {}  # since when, and the newest step
        self.since = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self.since = self.since if isinstance(event, Stepped) else time.monotonic()  # the next client starts now
        match event:
            case StageStarted():
                self._started(event)
            case Stepped():
                self._stepped(event)
            case Counted() | Encoded():
                self._counted(event)
            case Replied():
                self._replied(event)
            case Missed(round, client, reason):
                self._log(f"{round_words(round, self.rounds)}  {client}  {reason}")
            case Waiting(clients, seconds):
                until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
                self._log(f"waiting until {until} at most for {', '.join(clients)} to connect")
            case Scored(round, score):
                self._log(*_score_lines(round, score, self.rounds, self.baseline))
            case Noted(sentence):
                self._log(f"note: {sentence}")
            case StageEnded(stage, reused):
                self._ended(stage, reused)

    def _started(self, event: StageStarted) -> None:
        self.rounds, self.baseline = event.rounds, event.baseline
        self.replies = self.bytes = 0
        self.training = {}
        name = f"{event.stage}: " if event.stage else ""
        amounts = {"round": event.rounds, "client": len(event.clients), "example": sum(event.clients.values())}
        self._log(f"{name}{event.method}, {', '.join(plural(number, noun) for noun, number in amounts.items())}")
        self._log(*(f"data: {line}" for line in event.data), *(f"note: {note}" for note in event.notes))
        if event.engine:
            self._log(f"engine: {event.engine}")
        if event.done:
            self._log(f"continuing after {plural(event.done, 'finished round')}")
        self.bar.reset(self.line, total=float((event.rounds - event.done) * len(event.clients)))

    def _counted(self, event: Counted | Encoded) -> None:
        did = "encoded" if isinstance(event, Encoded) else "checked"
        what = "texts" if isinstance(event, Encoded) else event.what
        text = f"{did} {event.done:,} of {event.total:,} {what}"
        self.bar.update(self.line, description=text)
        if what == "plans" and event.done % 1_000_000 == 0:
            self._log(text)

    def _ended(self, stage: str, reused: bool) -> None:
        if reused:
            self._log(f"{stage or 'this job'}: finished before, not run again")
        self.bar.reset(self.line, description="preparing", total=None)

    def _stepped(self, event: Stepped) -> None:
        since, _ = self.training.get(event.client, (self.since, event))
        self.training[event.client] = since, event
        rate = event.examples / max(time.monotonic() - since, 1e-9)
        text = (
            f"{round_words(event.round, self.rounds)}  {event.client} loss {event.loss:.3f} "
            f"{rate:.0f}/s {self.bytes / 1e6:.1f} MB"
        )
        begun = sum(newest.step / newest.steps for _, newest in self.training.values())
        self.bar.update(self.line, description=text, completed=self.replies + begun)

    def _replied(self, event: Replied) -> None:
        self.bytes = event.bytes
        self.replies += 1
        # A site reports no single steps, so of its examples per second nothing is known.
        _, newest = self.training.pop(event.client, (0.0, None))
        speed = f"{newest.examples / max(event.seconds, 1e-9):.0f} examples/s" if newest else ""
        loss = "trained" if event.loss is None else f"loss {event.loss:.4f}"
        self._log(
            f"{round_words(event.round, self.rounds)}  {event.client}  {loss}  "
            f"{speed or f'{event.seconds:.1f} s'}  {event.bytes / 1e6:.1f} MB in total, all clients"
        )
        self.bar.update(self.line, completed=self.replies)


class ForecastDisplay(_Live):
    """Shows how far a forecast is: on a terminal at any time, in a log a line every so many seconds."""

    SILENCE = 10.0
    """Seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.since = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if not isinstance(event, Counted):
            return
        text = f"{event.done:,} of {event.total:,} {event.what}"
        self.bar.update(self.line, description=text, completed=event.done, total=event.total)
        if self.bar.disable and time.monotonic() - self.since > self.SILENCE:
            self.since = time.monotonic()
            self._log(f"fedstrata: {text}")


class SweepDisplay(_Live):
    """Shows the events of a sweep: one bar over all cells, and what each running cell is at."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.ended = 0
        self.running: dict[str, tuple[TaskID, StageStarted | None]] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case CellStarted(cell, number, count):
                self.bar.update(self.line, description="cells", total=count)
                self.running[cell] = (self.bar.add_task(cell, total=None), None)
                self._log(f"{cell}: started, cell {number + 1} of {count}")
            case CellEvent(cell, inner):
                self._cell_event(cell, inner)
            case CellEnded(cell, status, message, seconds):
                self.ended += 1
                self.bar.remove_task(self.running.pop(cell)[0])
                self.bar.update(self.line, completed=self.ended)
                self._log(f"{cell}: {status} after {seconds:.0f} s" + (f": {message}" if message else ""))

    def _cell_event(self, cell: str, event: Event) -> None:
        task, stage = self.running[cell]
        match event:
            case StageStarted():
                self.running[cell] = task, event
                self.bar.update(task, total=event.rounds * len(event.clients), completed=event.done)
            case Stepped(round) if stage:
                place = round_words(round, stage.rounds)
                self.bar.update(task, description=f"{cell}  {stage.stage} {place}  loss {event.loss:.3f}")
            case Replied():
                self.bar.advance(task)
            case Scored(round, score) if stage:
                for line in _score_lines(round, score, stage.rounds, stage.baseline):
                    self._log(": ".join(filter(None, [cell, stage.stage, line])))
            case Noted(sentence):
                self._log(f"{cell}: note: {sentence}")
            case StageEnded(name, True):
                self._log(f"{cell}: {name} was finished by another cell or before")


def round_words(round: int, rounds: int) -> str:
    """A 0-based round for a reader: ``round 1/5``, or ``before training`` for -1."""
    return f"round {round + 1}/{rounds}" if round >= 0 else "before training"


def _score_lines(round: int, score: dict[str, float], rounds: int, baseline: Baseline) -> list[str]:
    """Every metric, with the baseline's after the headline; after the last round, whether it was beaten."""
    words = []
    for name, value in score.items():
        always = baseline.score.get(name) if name == baseline.headline else None
        words.append(f"{name} {value:.4f}" + ("" if always is None else f" (baseline {always:.4f})"))
    lines = [f"{round_words(round, rounds)}  {'  '.join(words)}"]
    if round == rounds - 1 and not _beaten(score, baseline):
        name = baseline.headline
        lines.append(f"note: {name} {score[name]:.4f} is not better than {baseline.what}")
    return lines


def _beaten(score: dict[str, float], baseline: Baseline) -> bool:
    """Whether a score is better by the headline, or there is nothing to beat."""
    name = baseline.headline
    if name not in baseline.score or name not in score:
        return True
    sign = -1 if name in LOWER_IS_BETTER else 1
    return sign * score[name] > sign * baseline.score[name]
