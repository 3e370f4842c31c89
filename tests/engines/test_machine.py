"""What a process may use of its machine, on made-up machines: cores and memory within control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from fedstrata.engines import machine
from fedstrata.sweeps import workers

GIB = 1 << 30
NONE = "9223372036854771712"
"""What version 1 says where there is no limit."""
CASES: dict[str, tuple[str, dict[str, str], int, int]] = {
    "no groups": ("", {}, 16, 64),
    "without a limit": ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 16, 64),
    "a container": ("0::/", {"cpu.max": "400000 100000", "memory.max": f"{8 * GIB}"}, 4, 8),
    "half a core": ("0::/", {"cpu.max": "50000 100000"}, 1, 64),
    "a job within a machine": (
        "0::/jobs/7/step",
        {"jobs/7/memory.max": f"{8 * GIB}", "jobs/7/step/memory.max": "max", "jobs/7/cpu.max": "600000 100000"},
        6,
        8,
    ),
    "a container that sees its host's groups": ("0::/host/box", {"memory.max": f"{8 * GIB}"}, 16, 8),
    "beside its root": ("0::/../box", {"box/memory.max": f"{8 * GIB}"}, 16, 8),
    "version 1": (
        "5:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/",
        {
            "memory/memory.limit_in_bytes": NONE,
            "memory/box/memory.limit_in_bytes": f"{8 * GIB}",
            "cpu/box/cpu.cfs_quota_us": "250000",
            "cpu/box/cpu.cfs_period_us": "100000",
        },
        2,
        8,
    ),
    "version 1 without a limit": (
        "5:memory:/\n1:cpu:/",
        {
            "memory/memory.limit_in_bytes": NONE,
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
        },
        16,
        64,
    ),
}


def groups(patch: pytest.MonkeyPatch, folder: Path, own: str, files: Mapping[str, str]) -> None:
    """A machine of 16 cores and 64 GiB, and what its control groups say."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n", "utf-8")
    (folder / "own").write_text(own + "\n" if own else "", "utf-8")
    patch.setattr(machine, "CGROUP", folder)
    patch.setattr(machine, "OWN", folder / "own" if own else folder / "none")
    patch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    patch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__)
    patch.delenv("OMP_NUM_THREADS")


@pytest.mark.parametrize("case", CASES)
def test_limits_of_control_groups_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    own, files, cores, gibibytes = CASES[case]
    groups(monkeypatch, tmp_path, own, files)
    assert (machine.all_cores(), machine.cores()) == (cores, cores)
    assert machine.memory() == gibibytes * GIB


def test_a_process_with_a_share_of_the_cores_has_that_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups(monkeypatch, tmp_path, *CASES["a container"][:2])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (machine.all_cores(), machine.cores(), machine.memory()) == (4, 1, 2 * GIB)


def test_a_sweep_divides_the_cores_of_its_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups(monkeypatch, tmp_path, *CASES["a container"][:2])
    given: list[str] = []

    class Started:
        def __init__(self, command: list[str], env: Mapping[str, str], **_: object) -> None:
            given.append(env["OMP_NUM_THREADS"])
            self.stdout = open(os.devnull)  # noqa: SIM115

    monkeypatch.setattr(workers.subprocess, "Popen", Started)
    pool = workers.Workers(tmp_path, parallel=2)
    pool.idle()
    for thread in pool.listeners:
        thread.join()
    assert given == ["2"]
