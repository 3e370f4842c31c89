"""The table ``[track]``: where else a run's figures go while it goes on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstrata.job.base import Table

Tracker = Literal["tensorboard", "mlflow", "wandb", "trackio"]


class Track(Table):
    """``[track]``: trackers of runs that get scores, losses, bytes and the job; none by default."""

    to: list[Tracker] = Field(default_factory=list)
    """``tensorboard`` and ``trackio`` write files here; ``mlflow`` too, unless ``MLFLOW_TRACKING_URI`` names a
    server; ``wandb`` sends to its company's machines unless ``WANDB_MODE`` is ``offline``. Both get the page."""
    project: Annotated[str, Field(min_length=1)] = "fedstrata"
    """The name under which mlflow, wandb and trackio keep the runs."""
