"""Weights & Biases: its company's machines, or files where ``WANDB_MODE`` is ``offline``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.plan.kinds import TRACK
from fedstrata.trackers.tracker import Opening, flat, needs


def destination(folder: Path) -> str:
    """Where the figures go."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return f"files in {folder / TRACK}"
    return (
        f"the machines of {os.environ.get('WANDB_BASE_URL', 'https://api.wandb.ai')}, which are another company's"
    )


class WandbSink:
    """One run of Weights & Biases."""

    def __init__(self, wandb: Any, run: Any) -> None:
        self.wandb, self.run = wandb, run

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`; ``round`` is the axis, as losses of a round come apart."""
        self.run.log({**values, "round": step})

    def close(self, summary: Mapping[str, float], page: Path | None) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`."""
        self.run.summary.update(dict(summary))
        if page is not None:
            artifact = self.wandb.Artifact("report", type="report")
            artifact.add_file(str(page))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if summary else 1)


def open_sink(opening: Opening) -> WandbSink:
    """Begin a run.

    Raises:
        UserError: wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise needs("wandb", error) from None
    place = opening.folder / TRACK
    place.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=opening.project, name=opening.name, dir=str(place), config=flat(opening.job))
    return WandbSink(wandb, run)
