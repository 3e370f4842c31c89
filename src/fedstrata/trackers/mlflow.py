"""MLflow: files below the run's folder, or the server that ``MLFLOW_TRACKING_URI`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.plan.kinds import TRACK
from fedstrata.trackers.tracker import Opening, flat, needs

LONGEST = 500
"""Letters of a parameter's value."""


def destination(folder: Path) -> str:
    """Where the figures go."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    return f"the server {server}" if server else f"files in {folder / TRACK / 'mlruns'}"


class MlflowSink:
    """One run of an MLflow store."""

    def __init__(self, client: Any, run: str) -> None:
        self.client, self.run = client, run

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`."""
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=step)

    def close(self, summary: Mapping[str, float], page: Path | None) -> None:
        """See :class:`fedstrata.trackers.tracker.Sink`."""
        for name, value in summary.items():
            self.client.log_metric(self.run, f"result/{name}", value)
        if page is not None:
            self.client.log_artifact(self.run, str(page))
        self.client.set_terminated(self.run, "FINISHED" if summary else "FAILED")


def open_sink(opening: Opening) -> MlflowSink:
    """Begin a run in the project's experiment.

    Raises:
        UserError: mlflow is not installed.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise needs("mlflow", error) from None
    server = os.environ.get("MLFLOW_TRACKING_URI") or (opening.folder / TRACK / "mlruns").resolve().as_uri()
    client = MlflowClient(server)
    found = client.get_experiment_by_name(opening.project)
    experiment = found.experiment_id if found else client.create_experiment(opening.project)
    run = client.create_run(experiment, run_name=opening.name).info.run_id
    for key, value in flat(opening.job).items():
        client.log_param(run, key, value[:LONGEST])
    return MlflowSink(client, run)
