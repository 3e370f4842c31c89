"""Seconds and peak memory of a command with all its processes; and what kind of machine this is. Linux only."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIVEN = dict(os.environ)
"""The environment as it was given: importing FedStrata sets variables, which are not for its peers."""
POLL = 0.5
"""Seconds between two looks at the memory."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: a process whose parent has ended becomes our child


@dataclass
class Measured:
    """One run of a command.

    Attributes:
        seconds: from its start to its end.
        peak: the largest sum of its processes' memory that was seen, in bytes; shared pages count once (PSS).
        failed: why it did not end well; None if it did.
        result: what it wrote to ``result.json``.
    """

    seconds: float
    peak: int
    failed: str | None = None
    result: dict[str, Any] = field(default_factory=dict)


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += children.get(todo[0], [])
        found += children.get(todo.pop(0), [])
    return found


def memory(pid: int) -> int:
    """Bytes of a process, its share of shared pages included; 0 when it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def measure(command: Sequence[str], environment: Mapping[str, str], out: Path, limit: float) -> Measured:
    """Run a command to its end, or to the limit.

    Args:
        command: words.
        environment: its variables, beside those that this process was given.
        out: an empty folder, ``$OUT``; what it prints goes to ``log.txt`` in it.
        limit: seconds.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    before = set(descendants(os.getpid()))
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(POLL):
            peak = max(peak, sum(memory(pid) for pid in set(descendants(os.getpid())) - before))

    with (out / "log.txt").open("wb") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            env={**GIVEN, **environment, "OUT": str(out)},
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        failed = None
        try:
            if process.wait(limit):
                failed = f"ended with {process.returncode}: {last_words(out / 'log.txt')}"
        except subprocess.TimeoutExpired:
            failed = f"did not end within {limit:g} s"
        seconds = time.perf_counter() - started
        over.set()
        watcher.join()
    end(set(descendants(os.getpid())) - before)
    process.wait()
    result = {}
    if failed is None:
        if (out / "result.json").exists():
            result = json.loads((out / "result.json").read_text("utf-8"))
        else:
            failed = f"wrote no result: {last_words(out / 'log.txt')}"
    return Measured(seconds, peak, failed, result)


def end(pids: set[int]) -> None:
    """End processes that a command has left behind."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(OSError):
            os.waitpid(pid, 0)


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing was printed"])[-1][:300]


def machine() -> dict[str, Any]:
    """What a measurement depends on; no names of hosts."""
    import torch

    found = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    flags = set(found.get("flags", "").split())
    kilobytes = int(Path("/proc/meminfo").read_text().split()[1])  # MemTotal comes first
    return {
        "processor": found.get("model name", platform.machine()),
        "features": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(kilobytes / 1e6),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
