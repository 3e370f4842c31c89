"""Trackio: a local store of runs with a page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.trackers.tracker import Opening, flat, needs


def destination(folder: Path) -> str:
    """Where the figures go."""
    return "Trackio's store on this machine"


class TrackioSink:
    """One run of Trackio."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`."""
        self.run.log({**values, "round": step})

    def close(self, summary: Mapping[str, float], page: Path | None) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`; Trackio takes no files, so the page stays where it is."""
        self.run.log({f"result/{name}": value for name, value in summary.items()})
        self.run.finish()


def open_sink(opening: Opening) -> TrackioSink:
    """Begin a run.

    Raises:
        UserError: trackio is not installed.
    """
    try:
        import trackio
    except ImportError as error:
        raise needs("trackio", error) from None
    return TrackioSink(trackio.init(project=opening.project, name=opening.name, config=flat(opening.job)))
