"""What this process may use of its machine: cores and memory, with the limits of containers. No torch."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may use (version 2)."""


def cores() -> int:
    """Cores for this process: ``OMP_NUM_THREADS`` where it is set, as for a sweep's cells, else all there are."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    except (KeyError, ValueError):
        return all_cores()


def all_cores() -> int:
    """Cores that the system lets this process run on."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return max(1, min(found, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return found


def can_fork() -> bool:
    """Whether workers can be forked here: on Linux; elsewhere the system's own libraries do not survive it."""
    return sys.platform == "linux"


def memory() -> int:
    """Bytes of memory for this process; of a machine that it has some cores of, the same share."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 10**9
    with suppress(OSError, ValueError):
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return total * min(cores(), all_cores()) // all_cores()
