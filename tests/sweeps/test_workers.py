"""No two processes work on one sweep, not even when one of them was killed and left a worker behind."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from filelock import FileLock

import fedstrata
from fedstrata.errors import UserError
from fedstrata.reports.sweep_files import read_table
from fedstrata.sweeps import run, workers
from fedstrata.sweeps.work import _run as perform

REFUSED = r"another process is running this sweep"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.5)


def work(lock: Path, parent: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "fedstrata.sweeps.work", str(lock), str(parent)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def held(path: Path) -> bool:
    lock = FileLock(path, blocking=False)
    try:
        with lock:
            return False
    except TimeoutError:
        return True


def test_a_sweep_in_progress_is_refused_and_a_finished_one_is_free(tmp_path: Path) -> None:
    with workers.sole_user(tmp_path), pytest.raises(UserError, match=REFUSED), workers.sole_user(tmp_path):
        pass
    with workers.sole_user(tmp_path):
        pass


def test_a_worker_holds_the_sweep_as_long_as_it_lives(tmp_path: Path) -> None:
    lock = tmp_path / ".lock-3"
    with work(lock, os.getpid()) as process:
        until(lambda: held(lock))
        with pytest.raises(UserError, match=REFUSED), workers.sole_user(tmp_path):
            pass
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) == 0
    with workers.sole_user(tmp_path):
        pass


def test_a_worker_whose_sweep_is_gone_runs_nothing(tmp_path: Path) -> None:
    with work(tmp_path / ".lock-0", os.getpid() + 1) as process:
        out, _ = process.communicate('{"source": "nowhere.toml", "pairs": []}\n', 60)
        assert (process.returncode, out) == (0, "")


def test_the_last_worker_of_a_killed_sweep_keeps_others_away(job: Callable[..., Any], tmp_path: Path) -> None:
    made = job("fedavg", "classify", method={"rounds": 1000}, output={"dir": str(tmp_path / "out")})
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps({**made, "sweep": {"seeds": [0]}}))
    folder = tmp_path / "out"
    words = [sys.executable, "-m", "fedstrata", "run", "sweep.toml"]
    sweep = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    records = folder / "cells" / "all" / "seed-0" / "rounds.jsonl"
    until(lambda: records.exists() or sweep.poll() is not None)
    [worker] = [int(word) for word in _children(sweep.pid)]
    os.kill(worker, signal.SIGSTOP)
    sweep.kill()
    sweep.wait()
    try:
        with pytest.raises(UserError, match=REFUSED), workers.sole_user(folder):
            pass
    finally:
        os.kill(worker, signal.SIGCONT)
    until(lambda: not held(folder / ".lock-0"))  # it stops when it finds that nobody listens
    with workers.sole_user(folder):
        pass
    assert len(records.read_text().splitlines()) < 1000


def _children(parent: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        if int(fields[1]) == parent:
            found.append(stat.parent.name)
    return found


def test_a_cell_whose_sweep_was_killed_has_not_failed_but_was_stopped(
    job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    made = job("fedavg", "classify", method={"rounds": 1000}, output={"dir": str(tmp_path / "cell")})
    with work(tmp_path / ".lock-0", os.getpid()) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"source": made, "base_dir": None, "pairs": []}) + "\n")
        process.stdin.flush()
        while "Scored" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        assert process.wait(120) == 130
    result = json.loads((tmp_path / "cell" / "result.json").read_text("utf-8"))
    assert (result["status"], result["message"]) == ("stopped", "stopped by the user; --resume continues it")


def test_a_cell_that_a_full_disk_has_ended_says_so_in_the_words_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as ``OSError: [Errno 28] ...``."""

    def full(*_args: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "cells/a/model.safetensors")

    monkeypatch.setattr("fedstrata.runs.job.run_job", full)
    out = io.StringIO()
    perform({"source": {}, "base_dir": None, "pairs": []}, out)
    told = {"ended": "failed", "message": "cells/a/model.safetensors: No space left on device"}
    assert json.loads(out.getvalue()) == told


def one_cell(job: Callable[..., Any]) -> dict[str, Any]:
    return {**job("none", "classify"), "sweep": {"seeds": [0]}}


def test_the_table_is_written_before_others_may_go_on(
    job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written after: the table of a sweep with more seeds could be replaced by that of fewer."""
    seen = []

    def write(folder: Path, *_: Any) -> list[Any]:
        seen.append(held(folder / workers.LOCK))
        return []

    monkeypatch.setattr(run, "write_table", write)
    fedstrata.sweep(one_cell(job))
    assert seen == [True]


def test_of_two_sweeps_that_begin_in_one_new_folder_the_later_is_refused(
    job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the first and went on in its folder; its table took the other's place."""
    made = one_cell(job)

    @contextmanager
    def slow(folder: Path) -> Iterator[None]:
        monkeypatch.undo()
        fedstrata.sweep(made, {"output.dir": str(folder)}, resume=True)
        with workers.sole_user(folder):
            yield

    monkeypatch.setattr(run, "sole_user", slow)
    with pytest.raises(UserError, match=r"cells is not empty; continue its run with --resume"):
        fedstrata.sweep(made, {"sweep.seeds": [1]})
    assert list(read_table(tmp_path / "run").cells) == ["all, seed 0"]
