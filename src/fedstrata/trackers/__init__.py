"""Trackers of runs: a run's events, handed to TensorBoard, MLflow, Weights & Biases or Trackio; a file each.

A tracker is four functions (:class:`fedstrata.trackers.tracker.Sink`). One that fails while the run goes on is
left out from then on, and the run says so: no run ends because of a tracker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedstrata.trackers import mlflow, tensorboard, trackio, wandb
from fedstrata.trackers.tracker import Opening, Sink

TRACKERS: dict[str, Callable[[Opening], Sink]] = {
    "tensorboard": tensorboard.open_sink,
    "mlflow": mlflow.open_sink,
    "wandb": wandb.open_sink,
    "trackio": trackio.open_sink,
}
"""Name in ``[track] to`` -> what opens it."""
DESTINATIONS: dict[str, Callable[[Path], str]] = {
    "tensorboard": tensorboard.destination,
    "mlflow": mlflow.destination,
    "wandb": wandb.destination,
    "trackio": trackio.destination,
}
"""Name -> where its figures go, in words, from a run's output folder."""
PAGES = ("mlflow", "wandb")
"""Those that take the run's page as well, which tells of the clients' rows."""
