"""MLflow: files below the run's folder, or the server that ``MLFLOW_TRACKING_URI`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstrata.plan.kinds import TRACK
from fedstrata.trackers.tracker import Opening, flat, needs
from fedstrata.wire.files import write_bytes

LONGEST = 500
"""Letters of a parameter's value."""
RUN = "mlflow-run"
"""File beside MLflow's own with the id of the run there, which a resumed one goes on with."""


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
    """Begin a run in the project's experiment, or go on with the one that was begun for this folder.

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
    run = _begun(client, opening)
    known = client.get_run(run).data.params
    for key, value in flat(opening.job).items():
        if key not in known:  # MLflow lets none change
            client.log_param(run, key, value[:LONGEST])
    return MlflowSink(client, run)


def _begun(client: Any, opening: Opening) -> str:
    """The id of the folder's run; of a new one where it has none, or where the server knows it no more."""
    from mlflow.exceptions import MlflowException

    file = opening.folder / TRACK / RUN
    with suppress(OSError, MlflowException):
        run = client.get_run(file.read_text(encoding="utf-8"))
        if run.info.lifecycle_stage == "active":
            client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
    found = client.get_experiment_by_name(opening.project)
    experiment = found.experiment_id if found else client.create_experiment(opening.project)
    made = str(client.create_run(experiment, run_name=opening.name).info.run_id)
    write_bytes(file, made.encode())
    return made
