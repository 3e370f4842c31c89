"""The command line as its users meet it: exit codes, sentences, files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata import run

Jobs = Callable[..., dict[str, Any]]
COMMAND = [sys.executable, "-c", "from fedstrata.cli import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def fedstrata(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, cwd=folder, env=ENVIRONMENT
    )


@pytest.fixture
def path(job: Jobs, tmp_path: Path) -> Path:
    made = tmp_path / "job.toml"
    made.write_text(tomli_w.dumps(job("fedavg", "classify", output={"dir": "out"})), "utf-8")
    return made


def test_run_trains_and_ends_in_a_table(path: Path, tmp_path: Path) -> None:
    done = fedstrata("run", path, "method.rounds=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "client-2" in done.stdout
    assert "accuracy" in done.stdout
    assert "out/report.html" in done.stdout
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]  # a terminal wraps these
    assert max(map(len, lines)) <= 100
    assert done.stderr == ""
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "finished"
    again = fedstrata("run", path, "method.rounds=1", folder=tmp_path)
    assert again.returncode == 2
    assert "not empty" in again.stderr
    resumed = fedstrata("run", path, "method.rounds=1", "--resume", folder=tmp_path)
    assert resumed.returncode == 0
    assert "not run again" in resumed.stdout
    assert "model   out/model\n" in resumed.stdout
    shutil.move(tmp_path / "out" / "model", tmp_path / "elsewhere")
    resumed = fedstrata("run", path, "method.rounds=1", "--resume", folder=tmp_path)
    assert "model   out/model: was removed after the run had ended" in resumed.stdout
    page = fedstrata("report", "out", "--out", "page.html", folder=tmp_path)
    assert page.returncode == 0
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_a_run_that_leaves_adapters_alone_names_no_shared_folder(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    keys = ("adapter.kind=lora", "adapter.rank=2", "adapter.merged_model=false")
    done = fedstrata("run", path, "method.rounds=1", *keys, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "scored  adapter\n" in done.stdout
    assert "shared" not in done.stdout


def test_partition_shows_which_client_gets_which_rows(path: Path, tmp_path: Path) -> None:
    done = fedstrata("partition", path, "clients.partition=dirichlet", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("client-0", "client-2", "kidney", "heart", "eye", "job.partition.png", "12 test rows"):
        assert word in done.stdout
    assert (tmp_path / "job.partition.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_is_resumed_to_the_same_weights(path: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = ["run", str(path), "method.rounds=40"]
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # none in the background
    )
    state = tmp_path / "out" / "state"
    deadline = time.monotonic() + 600
    while not (state / "manifest-000001.json").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, told = process.communicate(timeout=600)
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130
        assert "--resume" in told
        assert "Traceback" not in told
        assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "stopped"
    newest = max(state.glob("manifest-*.json"))
    assert 1 <= json.loads(newest.read_text())["done"] < 40
    changes = ["method.rounds=40"]
    resumed = run(path, [*changes, f"output.dir={tmp_path / 'out'}"], resume=True)
    whole = run(path, [*changes, f"output.dir={tmp_path / 'whole'}"])
    one, other = ((made.model_folder / "model.safetensors").read_bytes() for made in (resumed, whole))
    assert one == other


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = fedstrata("--help", folder=tmp_path)
    assert done.returncode == 0
    for word in ("run", "partition", "report"):
        assert word in done.stdout
    assert "split" not in done.stdout.replace("split learning", "")


def test_a_reader_who_has_gone_is_no_error(path: Path, tmp_path: Path) -> None:
    """``forecast --json | head -1`` ended in "system error: Broken pipe"."""
    words = [sys.executable, "-m", "fedstrata", "forecast", str(path), "method.rounds=300", "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, **pipes) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 1


def test_a_sweep_ends_in_a_table_and_names_what_failed(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "classify", output={"dir": "out"}, method={"rounds": 1})
    bad = {"name": "bad", "data.train": "nowhere.csv"}
    made["sweep"] = {"against": "good", "rows": [{"name": "good"}, {"name": "mu", "train.proximal_mu": 1.0}, bad]}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(made), "utf-8")
    done = fedstrata("run", "sweep.toml", "sweep.seeds=[0,1]", folder=tmp_path)
    assert done.returncode == 2
    assert "good, seed 0: started, cell 1 of 6" in done.stdout
    assert "bad, seed 1: failed after" in done.stdout
    assert "2 cells failed; --resume tries again" in done.stderr
    assert "nowhere.csv" in done.stderr
    assert "Traceback" not in done.stderr
    table = done.stdout.split("accuracy")[-1]
    assert "(0 of 2)" in table
    assert max(map(len, table.splitlines()[1:-1])) <= 80
    assert "mu" in (tmp_path / "out" / "table.md").read_text()
    shown = fedstrata("report", "out", folder=tmp_path)
    assert shown.returncode == 0
    assert "(0 of 2)" in shown.stdout
    wrong = fedstrata("run", "sweep.toml", "sweep.seeds=3", folder=tmp_path)
    assert wrong.returncode == 2
    assert "[sweep] seeds" in wrong.stderr
