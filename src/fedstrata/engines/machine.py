"""What this process may use of its machine: cores and memory, with the limits of containers. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container, or a job of a cluster, may use."""
OWN = Path("/proc/self/cgroup")
"""Which control groups this process is in."""


def cores() -> int:
    """Cores for this process: ``OMP_NUM_THREADS`` where it is set, as for a sweep's cells, else all there are."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    except (KeyError, ValueError):
        return all_cores()


def all_cores() -> int:
    """Cores that the system lets this process run on."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = zip(_limits("cpu", "cpu.cfs_quota_us"), _limits("cpu", "cpu.cfs_period_us"), strict=False)
    for words in (*(text.split() for text in _limits("cpu", "cpu.max")), *quotas):
        with suppress(ValueError):  # "max", without a limit; in version 1 that is -1
            quota, period = map(int, words)
            found = min(found, quota // period) if quota > 0 else found
    return max(1, found)


def _limits(controller: str, file: str) -> Iterator[str]:
    """What a file says of each control group that this process is in, and of those around it.

    Of version 2 there is one tree, of version 1 one for each ``controller``; the files have other names.
    """
    try:
        groups = OWN.read_text().splitlines()
    except OSError:
        groups = []
    for group in (*groups, "0::/"):
        controllers, _, path = group.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        names = [controller] if controllers else []
        steps = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(steps) + 1):
            with suppress(OSError):
                yield CGROUP.joinpath(*names, *steps[:depth], file).read_text()


def can_fork() -> bool:
    """Whether workers can be forked here: on Linux; elsewhere the system's own libraries do not survive it."""
    return sys.platform == "linux"


def memory() -> int:
    """Bytes of memory for this process; of a machine that it has some cores of, the same share."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 10**9
    for text in (*_limits("memory", "memory.max"), *_limits("memory", "memory.limit_in_bytes")):
        with suppress(ValueError):
            total = min(total, int(text))
    return total * min(cores(), all_cores()) // all_cores()
