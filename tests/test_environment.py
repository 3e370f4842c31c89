"""How long threads spin: only where nothing else runs, never against what the user has set."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata import environment

IDLE, BUSY = "0.70 0.60 0.50 1/345 678\n", "0.00 0.00 0.00 2/345 678\n"


@pytest.mark.parametrize(
    ("load", "wanted"), [(IDLE, True), (BUSY, False), ("0.00 0.00 0.00 12/345 678\n", False), ("", False)]
)
def test_alone_is_who_runs_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str, wanted: bool
) -> None:
    (tmp_path / "loadavg").write_text(load)
    monkeypatch.setattr(environment, "LOAD", tmp_path / "loadavg")
    assert environment.alone() is wanted


def test_where_the_system_does_not_tell_nobody_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LOAD", tmp_path / "none")
    assert not environment.alone()


def test_what_wakes_up_now_and_then_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loadavg").write_text(BUSY)
    monkeypatch.setattr(environment, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(environment.time, "sleep", lambda _: (tmp_path / "loadavg").write_text(IDLE))
    assert environment.alone()


WAITING = """
import os, sys
from pathlib import Path
import fedstrata
from fedstrata import environment

environment.LOAD = Path(sys.argv[1])

class Loading(Exception): pass

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            raise Loading  # whatever stands in the environment now is what libgomp will read

sys.meta_path.insert(0, Finder())
try:
    fedstrata.run(sys.argv[2])
except Loading:
    print(os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("load", "given", "wanted"),
    [
        (IDLE, {}, "PASSIVE 20000"),
        (BUSY, {}, "PASSIVE None"),
        (IDLE, {"OMP_WAIT_POLICY": "PASSIVE"}, "PASSIVE None"),
        (IDLE, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        (IDLE, {"GOMP_SPINCOUNT": "7"}, "PASSIVE 7"),
    ],
)
def test_a_run_sets_it_before_torch_is_loaded(
    tmp_path: Path, load: str, given: dict[str, str], wanted: str
) -> None:
    (tmp_path / "loadavg").write_text(load)
    (tmp_path / "rows.txt").write_text("some words\n" * 40)
    (tmp_path / "job.toml").write_text(
        'model.name = "none"\ntask.kind = "mlm"\ndata.train = "rows.txt"\ndata.holdout = 0.25\n'
        'method.name = "fedavg"\noutput.dir = "out"\n'
    )
    given_here = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-c", WAITING, str(tmp_path / "loadavg"), str(tmp_path / "job.toml")]
    found = subprocess.run(words, env={**given_here, **given}, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == wanted, found.stderr


@pytest.mark.parametrize("collected", [True, False])
def test_garbage_is_collected_after_loading_if_it_was_before(collected: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collected else gc.disable)()
        with pytest.raises(ImportError, match="False"), environment.loading():
            raise ImportError(gc.isenabled())
        assert gc.isenabled() == collected
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(("before", "frozen"), [("", True), ("import torch", False)])
def test_only_libraries_that_are_loaded_first_are_left_out_of_later_collections(before: str, frozen: bool) -> None:
    script = f"""
import gc
from fedstrata import environment
{before}
with environment.loading():
    import torch
print(gc.get_freeze_count() > 10_000, gc.get_freeze_count() == 0)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(frozen), str(not frozen)]
