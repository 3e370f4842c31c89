"""Trackers: the figures of a run in TensorBoard's and MLflow's own files; one that fails ends no run."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.errors import UserError
from fedstrata.events import Noted, Scored
from fedstrata.trackers import DESTINATIONS, PAGES
from pages import DOCS

Jobs = Callable[..., dict[str, Any]]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_figures_of_the_run(job: Jobs) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fedstrata.run(job("fedavg", "classify", track={"to": ["tensorboard"]}))
    found = EventAccumulator(str(result.folder / "track" / "tensorboard"))
    found.Reload()
    scores = [event.value for event in found.Scalars("score/accuracy")]
    assert scores == pytest.approx(list(result.history["score.accuracy"].dropna()))
    assert [event.step for event in found.Scalars("loss/client-1")] == [1, 2]
    assert any("text_summary" in tag for tag in found.Tags()["tensors"])


def test_the_questions_name_every_tracker_that_may_send_to_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They named trackio, which keeps its figures here, and not mlflow, which may have a server elsewhere."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    away = {name for name, where in DESTINATIONS.items() if "https://" in where(tmp_path)}
    said = " ".join(
        (DOCS / "faq.md").read_text("utf-8").split("**Is anything sent to you")[1].partition("\n\n")[0].split()
    )
    assert {name for name in DESTINATIONS if name in said} == away
    for page in ("job.md", "privacy.md"):
        assert " and ".join(PAGES) in " ".join((DOCS / page).read_text("utf-8").split()), page


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_figures_job_and_page(job: Jobs) -> None:
    mlflow = pytest.importorskip("mlflow")
    result = fedstrata.run(job("fedavg", "classify", track={"to": ["mlflow"], "project": "hospitals"}))
    client = mlflow.MlflowClient((result.folder / "track" / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("hospitals").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["result/accuracy"] == pytest.approx(result.score["accuracy"])
    history = [one.value for one in client.get_metric_history(run.info.run_id, "score/accuracy")]
    assert history == pytest.approx(list(result.history["score.accuracy"].dropna()))
    assert run.data.params["task.kind"] == "classify"
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["report.html"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_what_the_run_cost(job: Jobs) -> None:
    """Epsilon was left out."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("dp_accounting")
    noise = {"level": "example", "noise": 1.0}
    made = job("fedavg", "classify", track={"to": ["mlflow"]}, privacy=noise)
    result = fedstrata.run(made, {"method.rounds": 1, "task.labels": ["eye", "heart", "kidney"]})
    client = mlflow.MlflowClient((result.folder / "track" / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("fedstrata").experiment_id])
    assert result.privacy is not None
    found = [run.data.metrics[f"result/{name}"] for name in ("epsilon", "flops", "bytes_up")]
    assert found == [result.privacy["epsilon"], result.flops, result.bytes["up"]]


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_fails_has_failed_in_mlflow_too(job: Jobs) -> None:
    mlflow = pytest.importorskip("mlflow")

    def fail(event: Any) -> None:
        if isinstance(event, Scored):
            raise ConnectionError("the line is dead")

    made = job("fedavg", "classify", track={"to": ["mlflow"]})
    with pytest.raises(ConnectionError):
        fedstrata.run(made, callbacks=[fail])
    client = mlflow.MlflowClient((Path(made["output"]["dir"]) / "track" / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("fedstrata").experiment_id])
    assert run.info.status == "FAILED"


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_goes_on_with_its_run_in_mlflow(job: Jobs) -> None:
    mlflow = pytest.importorskip("mlflow")

    def stop(event: Any) -> None:
        if isinstance(event, Scored) and event.round == 0:
            raise KeyboardInterrupt

    made = job("fedavg", "classify", track={"to": ["mlflow"]})
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, callbacks=[stop])
    result = fedstrata.run(made, {"train.learning_rate": 1e-5}, resume=True)
    client = mlflow.MlflowClient((result.folder / "track" / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("fedstrata").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == "5e-05", "MLflow lets no parameter change"
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "score/accuracy")]
    assert sorted(set(steps)) == [0, 1, 2]
    client.delete_run(run.info.run_id)
    fedstrata.run(made, {"train.learning_rate": 1e-5}, resume=True)
    assert len(client.search_runs([run.info.experiment_id])) == 1, "of a run that was deleted a new one is begun"


class Company:
    """Stands for wandb: notes what it is given, and breaks where it is told to."""

    def __init__(self, breaks: bool = False) -> None:
        self.given: list[dict[str, float]] = []
        self.breaks, self.summary, self.ended = breaks, dict[str, Any](), False

    def init(self, **how: Any) -> Company:
        self.given.append(how)
        return self

    def log(self, values: dict[str, float]) -> None:
        if self.breaks:
            raise ConnectionError("the line is dead")
        self.given.append(values)

    def Artifact(self, *names: str, **kinds: str) -> Company:
        return self

    def add_file(self, path: str) -> None:
        assert Path(path).exists()

    def log_artifact(self, artifact: Any) -> None: ...

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code == 0


@pytest.mark.parametrize("breaks", [False, True])
def test_whose_machines_get_the_figures_is_said_before_the_first(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    company = Company(breaks)
    module = types.ModuleType("wandb")
    module.__dict__.update(init=company.init, Artifact=company.Artifact)
    module.__spec__ = ModuleSpec("wandb", None)  # libraries that are loaded later look for it
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    events = list[Any]()
    told_first = list[bool]()
    made = job("fedavg", "classify", track={"to": ["wandb"]})
    original = company.init
    module.__dict__["init"] = lambda **how: (told_first.append(bool(events)), original(**how))[1]
    result = fedstrata.run(made, callbacks=[events.append])
    notes = [event.sentence for event in events if isinstance(event, Noted)]
    assert told_first == [True]
    assert any("the job and the page go to" in note and "another company's" in note for note in notes)
    assert result.status == "finished"
    assert company.ended is not breaks
    assert any("wandb failed and gets nothing more" in note for note in notes) is breaks


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_refused_can_be_called_again(job: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = job("fedavg", track={"to": ["tensorboard"]}, output={"dir": str(tmp_path / "tracked")})
    with pytest.raises(UserError, match="no folder"):
        fedstrata.run(made, {"model.name": str(tmp_path / "nowhere")})
    assert fedstrata.run(made).status == "finished"
    with pytest.raises(UserError, match="is not empty"):
        fedstrata.run(made)


def test_a_tracker_that_is_not_installed_is_refused_before_training(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"\[track\] to: 'trackio' needs the package trackio: pip install trackio"):
        fedstrata.run(job("fedavg", track={"to": ["trackio"]}))
    with pytest.raises(UserError, match="tensorbord"):
        fedstrata.run(job("fedavg", track={"to": ["tensorbord"]}))
