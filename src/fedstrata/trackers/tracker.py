"""What all trackers share: when they are told what, and what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedstrata.errors import UserError, first_words
from fedstrata.events import Event, Noted, Replied, Scored, StageStarted


@dataclass(frozen=True)
class Opening:
    """What a tracker is opened with.

    Attributes:
        folder: the run's output folder; files go below ``track/`` in it.
        project: the name under which runs are kept together.
        name: the run's name.
        job: the resolved job, table by table; key by key in :func:`flat`.
    """

    folder: Path
    project: str
    name: str
    job: Mapping[str, Any]


class Sink(Protocol):
    """One tracker of one run."""

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Take figures of round ``step``, counted from 1; 0 is before training."""

    def close(self, summary: Mapping[str, float], page: Path | None) -> None:
        """Take what the run came to, nothing of one that failed or was stopped, and its page, and end."""


class Tracking:
    """A run's trackers as one callback: its method ``__call__`` takes every event, ``close`` ends them.

    Args:
        sinks: the open trackers, by name.
        tell: receives a note when one fails.
    """

    def __init__(self, sinks: Mapping[str, Sink], tell: Callable[[Event], None]) -> None:
        self.sinks = dict(sinks)
        self.tell = tell
        self.stage = ""

    def __call__(self, event: Event) -> None:
        """Hand an event's figures to every tracker."""
        match event:
            case StageStarted():
                self.stage = f"{event.stage}/" if event.stage else ""
            case Replied():
                values = {"bytes": float(event.bytes)}
                values |= {} if event.loss is None else {f"loss/{event.client}": event.loss}
                self._all(lambda sink: sink.figures(self._named(values), event.round + 1))
            case Scored():
                values = {f"score/{name}": value for name, value in event.score.items()}
                self._all(lambda sink: sink.figures(self._named(values), event.round + 1))

    def close(self, summary: Mapping[str, float], page: Path | None) -> None:
        """End every tracker."""
        self._all(lambda sink: sink.close(summary, page))
        self.sinks = {}

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        return {f"{self.stage}{name}": value for name, value in values.items()}

    def _all(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self.sinks.items()):
            try:
                call(sink)
            except Exception as error:  # whatever a tracker raises: the run goes on without it
                del self.sinks[name]
                self.tell(Noted(f"[track] {name} failed and gets nothing more of this run: {first_words(error)}"))


def flat(job: Mapping[str, Any]) -> dict[str, str]:
    """A job's keys as ``table.key``, with their values as texts."""
    return {
        f"{table}.{key}": str(value)
        for table, keys in job.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
        if value is not None
    }


def needs(package: str, error: ImportError) -> UserError:
    """What is said where a tracker's library is not installed."""
    return UserError(f"[track] to: {package!r} needs the package {error.name or package}: pip install {package}")
