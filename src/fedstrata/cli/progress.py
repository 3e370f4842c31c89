"""Live progress of a run: a line per reply and score; on a terminal bars below them, with the time left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedstrata.cli.common import check_stopped
from fedstrata.cli.words import round_words, score_lines
from fedstrata.errors import megabytes, plural
from fedstrata.events import (
    Awaited,
    Baseline,
    Counted,
    Encoded,
    Event,
    Missed,
    Noted,
    Replied,
    RoundEnded,
    Scored,
    StageEnded,
    StageStarted,
    Stepped,
    Waiting,
)
from fedstrata.reports.times import clock, left_words, time_left

MOST_BARS = 8
"""Clients with a bar of their own at a time."""


class Live:
    """A bar that lives as long as its ``with`` block, lines above it, and more bars below it."""

    SILENCE = 60.0
    """Seconds after which a log says again what is going on."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.terminal = console.is_terminal
        self.line = self.add("preparing", None)
        self.spoke = self.told_left = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def add(self, text: str, total: float | None) -> TaskID:
        """One more bar."""
        return self.bar.add_task(text, total=total, left="")

    def log(self, *lines: str) -> None:
        """Print lines above the bars."""
        for line in lines:
            self.spoke = time.monotonic()
            self.bar.console.print(line, soft_wrap=True, markup=False)

    def log_if_silent(self, line: str) -> None:
        """Print a line in a log that has said nothing for a while; a terminal shows bars instead."""
        if not self.terminal and time.monotonic() - self.spoke > self.SILENCE:
            self.log(line)

    def log_time_left(self, line: str) -> None:
        """Print a line in a log, unless such a line was printed a moment ago; a terminal shows bars instead."""
        if not self.terminal and time.monotonic() - self.told_left > self.SILENCE:
            self.told_left = time.monotonic()
            self.log(line)


@dataclass
class Training:
    """A client that trains: when it began, its newest step, and its bar."""

    since: float
    newest: Stepped
    bar: TaskID | None = None


class Display(Live):
    """Shows the events of a run; called with each."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.rounds = self.total = 0  # in all, and in this call
        self.baseline = Baseline()
        self.ended = 0  # rounds of this call
        self.expected = 1  # replies in a round
        self.replies = 0  # in this round
        self.bytes = 0
        self.training: dict[str, Training] = {}
        self.since = self.began = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        check_stopped()
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
            case RoundEnded():
                self._round_ended(event)
            case Missed(client=client):
                self._drop(client)
                self._tell(event)
            case _:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        """Show an event that leaves the bars as they are."""
        match event:
            case Missed(round, client, reason):
                self.log(f"{round_words(round, self.rounds)}  {client}  {reason}")
            case Waiting(clients, seconds):
                self.log(f"waiting until {clock(seconds)} at most for {', '.join(clients)} to connect")
            case Awaited(round, clients, seconds):
                names = ", ".join(clients)
                line = f"{round_words(round, self.rounds)}  waiting for {names} until {clock(seconds)}"
                self.bar.update(self.line, description=line)
                self.log_if_silent(line)
            case Scored(round, score):
                self.log(*score_lines(round, score, self.rounds, self.baseline))
            case Noted(sentence):
                self.log(f"note: {sentence}")
            case StageEnded(stage, reused):
                self._ended(stage, reused)

    def _started(self, event: StageStarted) -> None:
        self.rounds, self.total, self.baseline = event.rounds, event.rounds - event.done, event.baseline
        self.ended = self.replies = self.bytes = 0
        self.expected = max(1, len(event.clients))
        self.began = time.monotonic()
        for client in list(self.training):
            self._drop(client)
        name = f"{event.stage}: " if event.stage else ""
        amounts = {"round": event.rounds, "client": len(event.clients), "example": sum(event.clients.values())}
        self.log(f"{name}{event.method}, {', '.join(plural(number, noun) for noun, number in amounts.items())}")
        self.log(*(f"data: {line}" for line in event.data), *(f"note: {note}" for note in event.notes))
        if event.engine:
            self.log(f"engine: {event.engine}")
        if event.done:
            self.log(f"continuing after {plural(event.done, 'finished round')}")
        self.bar.reset(self.line, total=float(self.total), left="")

    def _counted(self, event: Counted | Encoded) -> None:
        if isinstance(event, Encoded):
            text = f"encoded {event.done:,} of {event.total:,} texts"
        else:
            text = f"{'calibrated' if event.what == 'clients' else 'checked'} {amount(event)}"
        self.bar.update(self.line, description=text)
        if isinstance(event, Counted) and event.what == "plans" and event.done % 1_000_000 == 0:
            self.log(text)
        self.log_if_silent(text)

    def _ended(self, stage: str, reused: bool) -> None:
        if reused:
            self.log(f"{stage or 'this job'}: finished before, not run again")
        self.bar.reset(self.line, description="preparing", total=None, left="")

    def _stepped(self, event: Stepped) -> None:
        client = self.training.setdefault(event.client, Training(self.since, event))
        client.newest = event
        rate = event.examples / max(time.monotonic() - client.since, 1e-9)
        text = f"{event.client}  loss {event.loss:.3f}  step {event.step} of {event.steps}  {rate:.0f}/s"
        if client.bar is None and sum(other.bar is not None for other in self.training.values()) < MOST_BARS:
            client.bar = self.add(text, event.steps)
        if client.bar is not None:
            left = time_left(client.since, event.step, event.steps)
            self.bar.update(client.bar, description=text, completed=event.step, left=left)
        self._advance(event.round)
        self.log_if_silent(f"{round_words(event.round, self.rounds)}  {text}")

    def _replied(self, event: Replied) -> None:
        self.bytes = event.bytes
        self.replies += 1
        client = self._drop(event.client)
        # A site reports no single steps, so of its examples per second nothing is known, and with noise no time.
        speed = f"{client.newest.examples / max(event.seconds, 1e-9):.0f} examples/s" if client else ""
        loss = "trained" if event.loss is None else f"loss {event.loss:.4f}"
        took = speed or (f"{event.seconds:.1f} s" if event.seconds else "")
        self.log(
            f"{round_words(event.round, self.rounds)}  {event.client}  {loss}  {took}{'  ' if took else ''}"
            f"{megabytes(event.bytes)} in total, all clients"
        )
        self._advance(event.round)

    def _round_ended(self, event: RoundEnded) -> None:
        self.ended += 1
        self.expected, self.replies = max(1, self.replies), 0  # where clients are sampled it is not all of them
        self._advance(event.round)
        if event.round + 1 < self.rounds:
            self.log_time_left(f"{round_words(event.round, self.rounds)}  done, {left_words(event.left)}")

    def _advance(self, round: int) -> None:
        """Move the bar of all rounds, each of which counts as 1."""
        begun = sum(client.newest.step / client.newest.steps for client in self.training.values())
        done = self.ended + min(1.0, (self.replies + begun) / self.expected)
        left = time_left(self.began, done, self.total)
        text = f"{round_words(round, self.rounds)}  {megabytes(self.bytes)}"
        self.bar.update(self.line, description=text, completed=done, left=left)

    def _drop(self, name: str) -> Training | None:
        """Forget a client that trains no more; what was known of it."""
        client = self.training.pop(name, None)
        if client and client.bar is not None:
            self.bar.remove_task(client.bar)
        return client


def amount(event: Counted) -> str:
    """How much of what is ready."""
    what = "the noise of " if event.what == "clients" else ""
    return f"{what}{event.done:,} of {event.total:,} {event.what}"


class ForecastDisplay(Live):
    """Shows how far a forecast is: on a terminal at any time, in a log a line every so many seconds."""

    SILENCE = 10.0
    """Seconds."""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        check_stopped()
        if isinstance(event, Counted):
            text = amount(event)
            self.bar.update(self.line, description=text, completed=event.done, total=event.total)
            self.log_if_silent(f"fedstrata: {text}")
