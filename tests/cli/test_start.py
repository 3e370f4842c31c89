"""How the command line starts: what it prints of itself, and what it does not import to do so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = "{'torch', 'transformers', 'datasets', 'matplotlib', 'jinja2', 'sklearn', 'scipy'}"
COMMAND = f"""
import sys
from fedstrata.cli import main
try:
    main()
except SystemExit as end:
    print("ended", end.code, sorted({HEAVY} & sys.modules.keys()))
"""
JOB = """
model.name = "nowhere"
task.kind = "mlm"
data.train = "nowhere.txt"
method.name = "fedavg"
"""


def python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--help"], "ended 0 []"),
        (["--version"], "ended 0 []"),
        (["run", "--help"], "ended 0 []"),
        (["run", "job.toml", "train.epoch=1"], "ended 2 []"),
        (["partition", "job.toml", "train.epoch=1"], "ended 2 []"),
        (["forecast", "job.toml", "train.epoch=1"], "ended 2 []"),
        (["forecast", "job.toml", "--methods", "fedavg,fedprox", "train.epoch=1"], "ended 2 []"),
        (["run", "sweep.toml", "sweep.paralel=2"], "ended 2 []"),
        (["run", "sweep.toml", "train.epoch=1"], "ended 2 []"),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(words: list[str], end: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "sweep.toml").write_text(JOB + "sweep.seeds = [0, 1]\n")
    done = python("-c", COMMAND, *words, folder=tmp_path)
    assert done.stdout.splitlines()[-1] == end, done.stderr
    if "2" in end:
        assert "no such key; did you mean" in done.stderr


@pytest.mark.parametrize(
    "call",
    [
        "fedstrata.run({'train': {'epoch': 1}, **JOB})",
        "fedstrata.forecast({'train': {'epoch': 1}, **JOB})",
        "fedstrata.sweep({'train': {'epoch': 1}, 'sweep': {'seeds': [0]}, **JOB})",
    ],
)
def test_the_python_face_reports_a_mistyped_key_as_early(call: str, tmp_path: Path) -> None:
    code = f"""
import sys, tomllib, fedstrata
JOB = tomllib.loads({JOB!r})
try:
    {call}
except fedstrata.UserError as error:
    print(error)
print(sorted({HEAVY} & sys.modules.keys()))
"""
    done = python("-c", code, folder=tmp_path)
    assert "did you mean 'epochs'" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_terminal_that_is_not_utf_8_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    code = "import fedstrata.cli; fedstrata.cli.main = lambda: print('a – b'); from fedstrata.__main__ import main"
    done = python("-c", f"{code}; main()", folder=tmp_path)
    assert (done.stdout, done.stderr) == ("a ? b\n", "")


def test_a_run_needs_none_of_the_pages_libraries(tmp_path: Path) -> None:
    code = (
        "import sys, fedstrata.runs.stages, fedstrata.sweeps.run; print('matplotlib' in sys.modules, *sys.modules)"
    )
    done = python("-c", code, folder=tmp_path)
    assert done.stdout.startswith("False "), done.stderr
    assert not {"fedstrata.reports.page", "fedstrata.reports.plots"} & set(done.stdout.split())


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = python("-m", "fedstrata", "--version", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("fedstrata 0.")
    short, long = (python("-m", "fedstrata", word, folder=tmp_path).stdout for word in ("-h", "--help"))
    assert short == long
    commands = ["run", "forecast", "partition", "report", "federation", "serve", "join"]
    assert [long.count(f" {name} ") > 0 for name in commands] == [True] * len(commands)


def test_the_python_face_has_the_classes_a_caller_needs() -> None:
    import fedstrata
    from fedstrata.job.tables import Job
    from fedstrata.plan.plan import Method, Plan
    from fedstrata.runs.result import Result

    assert (fedstrata.Job, fedstrata.Method, fedstrata.Plan, fedstrata.Result) == (Job, Method, Plan, Result)
    assert set(fedstrata.__all__) <= set(dir(fedstrata))
    with pytest.raises(AttributeError, match="no attribute 'Jobs'"):
        _ = fedstrata.Jobs
