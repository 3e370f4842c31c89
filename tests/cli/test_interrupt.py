"""Ctrl-C at the very start: while the libraries are still being loaded there is no traceback either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
