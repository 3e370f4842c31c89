"""Ctrl-C while the libraries are still being loaded: no traceback either, and no run that goes on all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

COMMAND = """
import os, signal, sys


class Interrupt:
    \"\"\"Presses Ctrl-C when a module is first looked for.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)


def child(module, words):
    global MODULE
    MODULE = module
    signal.signal(signal.SIGINT, signal.default_int_handler)  # none in the background
    sys.meta_path.insert(0, Interrupt())
    sys.argv = ["fedstrata", *words]
    from fedstrata.__main__ import main
    main()


for module, *words in CASES:
    if not (process := os.fork()):
        os.dup2(1, 2)
        try:
            child(module, words)
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        except BaseException as error:
            print("Traceback", repr(error), flush=True)
        os._exit(1)
    print(module, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
EARLY = [
    "typer",
    "click",
    "fedstrata.cli.jobs",
    "rich.console",
    "pydantic",
    "fedstrata.job.tables",
    "fedstrata.data.prepare",
]


def test_ctrl_c_while_libraries_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("A kidney.\n" * 20)
    (tmp_path / "job.toml").write_text(
        """
        model.name = "nowhere"
        task.kind = "mlm"
        data.train = "rows.txt"
        method.name = "fedavg"
        """
    )
    cases = [
        *((module, "run", "job.toml") for module in EARLY),
        ("torch", "run", "job.toml"),
        ("torch", "forecast", "job.toml"),
    ]
    code = f"CASES = {cases!r}\n{COMMAND}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    ends = [f"fedstrata: stopped\n{module} 130\n" for module, *_ in cases]
    assert done.stdout == "".join(ends), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "rows.txt"]


LOST = """
import os, signal, sys


class Deleted:
    def __del__(self):
        os.kill(os.getpid(), NUMBER)
        for _ in range(3):
            pass


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "fedstrata.runs.train":
            sys.meta_path.remove(self)
            Deleted()


signal.signal(signal.SIGINT, signal.default_int_handler)  # none in the background
sys.meta_path.insert(0, Finder())
from fedstrata.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_python_discards_stops_the_run_all_the_same(
    job: Callable[..., dict[str, Any]], tmp_path: Path, number: int
) -> None:
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job("fedavg")))
    code = LOST.replace("NUMBER", str(int(number)))
    command = [sys.executable, "-c", code, "run", str(tmp_path / "job.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "Exception ignored in: <function Deleted.__del__" in done.stderr
    assert done.returncode == 130, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == "fedstrata: stopped; the same command with --resume continues after the last finished round"
    assert not (tmp_path / "run" / "model").exists()
