"""What a run was made with: versions, machine, date, command, and the state of the sources it was started in."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedstrata.engines.machine import cores
from fedstrata.wire.files import write_bytes

FILE = "environment.json"
PACKAGES = ("fedstrata", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "peft", "flwr")


def record_environment(folder: Path, threads: int | str) -> None:
    """Add what this call runs with to ``environment.json``: one entry for each call that trained in the folder."""
    entry = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv) if sys.argv[0] else "python",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": _machine(),
        "threads": threads,
        "git": _git(),
    }
    write_bytes(folder / FILE, json.dumps([*environments(folder), entry], indent=1, ensure_ascii=False).encode())


def environments(folder: Path) -> list[dict[str, Any]]:
    """The entries of the calls that trained in a folder; none where there is no such file."""
    try:
        return list(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    """The kind of machine, without its name or its user's."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "gpus": gpus,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _git() -> dict[str, Any] | None:
    """The commit of the sources around the working directory, and whether they differ; None outside of git."""
    above = Path.cwd()
    if not any((folder / ".git").exists() for folder in (above, *above.parents)):
        return None
    try:
        commit = _asked("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_asked("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _asked(*words: str) -> str:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True, env=quiet)
    return done.stdout.strip()
