"""A run with its trackers: opened before anything is trained, told every event, closed with the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.callbacks import calls
from fedstrata.errors import UserError, first_words
from fedstrata.events import Event, Noted
from fedstrata.job.tables import Job

if TYPE_CHECKING:
    from fedstrata.runs.result import Result

Tell = Callable[[Event], None]


@contextmanager
def tracked(jobs: Sequence[Job], tell: Tell) -> Iterator[tuple[Tell, Callable[[Result], None]]]:
    """What receives the run's events, trackers included, and what takes its result at the end.

    Raises:
        UserError: a tracker's library is not installed, or it cannot be opened.
    """
    wanted = list(dict.fromkeys(name for job in jobs for name in job.track.to))
    if not wanted:
        yield tell, lambda result: None
        return
    from fedstrata.trackers import DESTINATIONS, PAGES, TRACKERS
    from fedstrata.trackers.tracker import Opening, Sink, Tracking

    folder = Path(jobs[0].output.dir)
    opening = Opening(folder, jobs[0].track.project, folder.resolve().name, jobs[-1].dump())
    sinks: dict[str, Sink] = {}
    for name in wanted:
        what = (
            "scores, losses, bytes, the job and the page" if name in PAGES else "scores, losses, bytes and the job"
        )
        tell(Noted(f"[track] {name}: {what} go to {DESTINATIONS[name](folder)}"))
        try:
            sinks[name] = TRACKERS[name](opening)
        except UserError:
            raise
        except Exception as error:  # whatever a tracker raises
            raise UserError(f"[track] to: {name!r} cannot be opened ({first_words(error)})") from None
    tracking = Tracking(sinks, tell)

    def close(result: Result) -> None:
        from fedstrata.reports.report import write_report

        summary = {**result.score, "bytes_up": result.bytes["up"], "bytes_down": result.bytes["down"]}
        summary |= {"flops": float(result.flops), "seconds": result.seconds}
        if (epsilon := (result.privacy or {}).get("epsilon")) is not None:
            summary["epsilon"] = epsilon
        tracking.close(summary, write_report([result.folder]) if tracking.sinks else None)

    try:
        yield calls([tell, tracking]), close
    finally:
        tracking.close({}, None)
