"""TensorBoard: event files below the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.plan.kinds import TRACK
from fedstrata.trackers.tracker import Opening, needs


def destination(folder: Path) -> str:
    """Where the figures go."""
    return f"files in {folder / TRACK / 'tensorboard'}"


class TensorBoardSink:
    """Writes scalars, the job as text, and at the end what the run came to."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, summary: Mapping[str, float], page: Path | None) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`."""
        self.writer.add_text("result", json.dumps(dict(summary), indent=1))
        if page is not None:
            self.writer.add_text("report", str(page.name))
        self.writer.close()


def open_sink(opening: Opening) -> TensorBoardSink:
    """Begin event files.

    Raises:
        UserError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise needs("tensorboard", error) from None
    writer = SummaryWriter(str(opening.folder / TRACK / "tensorboard"))
    writer.add_text("job", f"```\n{json.dumps(opening.job, indent=1)}\n```")
    return TensorBoardSink(writer)
