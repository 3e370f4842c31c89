"""Live progress of a site: on a terminal bars while it works and a line per round, in a log a line a minute."""

from __future__ import annotations

import time
from statistics import median
from typing import Self

from rich.console import Console

from fedstrata.cli.progress import Live
from fedstrata.cli.words import round_words
from fedstrata.errors import plural
from fedstrata.events import Answered, Asked, Declined, RunEnded, SiteEvent, Worked
from fedstrata.reports.times import duration, left_words, time_left

DOES = {"train": "trained", "hidden_states": "encoded its texts"}
"""Phase -> what is said of it; of the others, which take little time, nothing is said."""


class SiteDisplay(Live):
    """Shows the events of a site; called with each.

    Bars are there only while it works: between that, its owner may be asked something on the terminal.
    """

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(console)
        self.name = name
        self.steps = self.add("", None)
        self.asked: Asked | None = None
        self.worked: Worked | None = None
        self.since = time.monotonic()
        self.reached = 0, self.since  # rounds of the run when one was answered last, and when that was
        self.paces: list[float] = []  # seconds of each round that was answered
        self.declined: set[Declined] = set()  # no more in a day than new refusals leave the site

    def __enter__(self) -> Self:
        return self

    def __call__(self, event: SiteEvent) -> None:
        """Show one event."""
        match event:
            case Asked():
                self._asked(event)
            case Worked():
                self._worked(event)
            case Answered(failed):
                self._answered(failed)
            case Declined(run, reason) if event not in self.declined:
                self.declined.add(event)
                self.log(f"{self.name}: {f'run {run[:8]}: ' if run else ''}{reason}")
            case RunEnded(run) if self.asked and self.asked.run == run:
                self.log(f"{self.name}: the run is over")
                self.asked = None

    def _asked(self, event: Asked) -> None:
        self.since, self.worked = time.monotonic(), None
        if self.asked is None or self.asked.run != event.run:
            self.reached, self.paces = (max(0, event.round), self.since), []  # -1: the start model
            self.log(f"{self.name}: takes part in a run: {event.method}, {plural(event.rounds, 'round')}")
        self.asked = event
        self.bar.update(self.line, description=self._place(), completed=event.round, total=event.rounds)
        self.bar.reset(self.steps, description=event.phase, total=None, left="")
        if self.terminal:
            self.bar.start()

    def _worked(self, event: Worked) -> None:
        self.worked = event
        rate = event.examples / max(time.monotonic() - self.since, 1e-9)
        text = f"loss {event.loss:.3f}  step {event.step} of {event.steps}  {rate:.0f}/s"
        left = time_left(self.since, event.step, event.steps)
        self.bar.update(self.steps, description=text, completed=event.step, total=event.steps, left=left)
        self.log_if_silent(f"{self.name}: {self._place()}  {text}")

    def _answered(self, failed: bool) -> None:
        if self.terminal:
            self.bar.stop()
        assert self.asked is not None
        if failed or (did := DOES.get(self.asked.phase)) is None:
            return
        done = self.asked.round + 1
        left = self._left(done, self.asked.rounds)
        self.bar.update(self.line, completed=done, left=left)
        loss = f"loss {self.worked.loss:.4f}" if self.worked else ""
        took = duration(time.monotonic() - self.since)
        line = "  ".join(filter(None, [f"{self.name}: {self._place()}", f"{did} in {took}", loss, left]))
        if self.terminal:
            self.log(line)
        else:
            self.log_time_left(line)

    def _left(self, done: int, rounds: int) -> str:
        """How long the rest of the run takes at the pace of most rounds; a server that was away has none."""
        (before, then), now = self.reached, time.monotonic()
        if done > before:
            self.paces.append((now - then) / (done - before))
        self.reached = done, now
        return left_words(median(self.paces) * (rounds - done)) if self.paces and done < rounds else ""

    def _place(self) -> str:
        assert self.asked is not None
        return round_words(self.asked.round, self.asked.rounds)
