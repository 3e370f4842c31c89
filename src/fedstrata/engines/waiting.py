"""How long OMP threads spin before they sleep; libgomp reads it when torch is loaded."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOAD = Path("/proc/loadavg")
"""Where Linux says how many threads run or could."""
SPINS = "20000"
"""On a machine where nothing else runs; about half a millisecond (docs/decisions/engine.md)."""
LOOKS = 3
LOOK_SECONDS = 1e-3


def spin_if_alone() -> None:
    """Let threads spin if nothing else runs at this moment; what the environment says already stays."""
    if "GOMP_SPINCOUNT" not in os.environ and alone():
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
