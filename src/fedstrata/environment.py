"""What the libraries below read of the environment when they are loaded; what the user has set stays."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLES = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""OMP threads that wait for each other sleep: if they spin beside another busy process, a training step takes up
to ten times as long. Large tensors stand in huge pages where the system has them: a fresh one costs half the time
(docs/decisions/engine.md)."""
SPINS = "20000"
"""That OMP threads take before they sleep, on a machine where nothing else runs; about half a millisecond."""
LOAD = Path("/proc/loadavg")
"""Where Linux says how many threads run or could."""
LOOKS = 3
LOOK_SECONDS = 1e-3
WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
"""What decides how OMP threads wait."""
_given: set[str] = set()


def prepare() -> None:
    """Set what is not set."""
    _given.update(WAITING & os.environ.keys())
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


@contextmanager
def loading() -> Iterator[None]:
    """While libraries are loaded no garbage is looked for among their objects: a sixth of the time.

    Nor is it afterwards, if torch is among them: they live as long as the process, whose end would spend
    half a second on them.
    """
    collected, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first and "torch" in sys.modules:
            gc.freeze()
        if collected:
            gc.enable()


def spin_if_alone() -> None:
    """Before torch is loaded: let OMP threads spin if nothing else runs at this moment."""
    if not _given and alone():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def alone() -> bool:
    """Whether nothing but this process runs; False where the system does not tell.

    A process that is busy all the time is seen at every look, one that wakes up now and then is not.
    """
    for _ in range(LOOKS):
        try:
            if LOAD.read_text("ascii").split()[3].startswith("1/"):
                return True
        except (OSError, IndexError, UnicodeDecodeError):
            return False
        time.sleep(LOOK_SECONDS)
    return False
