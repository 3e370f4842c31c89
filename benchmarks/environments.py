"""An environment of its own for every peer, at pinned versions, made when it is first needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""At the versions of ``constraints.txt`` in every environment."""
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "loops": ("accelerate>=1.10",),
    "pfl": ("pfl==0.6.*",),
    "flower": ("flwr[simulation]==1.41.*",),
    "nvflare": ("nvflare==2.9.*",),
    "fl4health": ("fl4health",),
}
"""Name -> what is installed beside ``BASE``. FedStrata runs in the environment of this command."""


class NotInstalledError(Exception):
    """An environment could not be made; the reason as a phrase."""


def folder() -> Path:
    """Where the environments are: ``benchmarks`` in the folder of FedStrata's caches."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedstrata"
    return Path(os.environ.get("FEDSTRATA_CACHE", default)) / "benchmarks"


def requirements(name: str) -> list[str]:
    """What an environment holds."""
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line
    )
    return [*(f"{package}=={pinned[package]}" for package in BASE), *ENVIRONMENTS[name]]


def python_of(name: str) -> Path:
    """The Python of an environment, which is made if it is not there.

    Raises:
        NotInstalledError: pip refused.
    """
    wanted = requirements(name)
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:8]
    place = folder() / f"{name}-{digest}"
    python, done, failed = place / "bin" / "python", place / "installed", place / "failed"
    if done.exists():
        return python
    if not failed.exists():
        print(f"installing {', '.join(wanted)} into {place}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        ended = subprocess.run(install, capture_output=True, text=True)
        (failed if ended.returncode else done).write_text(ended.stderr, "utf-8")
        if not ended.returncode:
            return python
    raise NotInstalledError(reason(failed.read_text("utf-8")))


def reason(said: str) -> str:
    """Why pip refused, from what it said."""
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR")]
    if any("different python version" in line for line in errors):
        return f"none of its versions installs under Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"does not install: {errors[-1] if errors else 'pip gave no reason'}"
