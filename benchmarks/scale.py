"""Runs of 10 to 100,000 clients: their start, rounds, memory, disk and page; and a forecast of 1,000 rounds.

    python benchmarks/scale.py --json scale.json
    python benchmarks/scale.py --table scale.json       # into docs/results/speed.md

A client trains one step on 4 made-up texts, with 2 layers of width 128. *Start* lasts from the start of the
process to the first round, with the reading of all rows; a *round* is the mean of those after the first; the
*page* is the command ``fedstrata report``. Linux only, because memory is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from measure import machine, measure, summary
from speed import PAGE, ranged, seconds, shaped_job
from tables import fill
from workloads import random_model

NAME = "benchmarks/scale.py --table"
SIZE = (2, 128, 2)
"""Layers, width, heads of the model of ``workloads.random_model("small")``."""
ROUNDS = 3
RUN = """
import json, os, sys, time
import fedstrata
from fedstrata.events import RoundEnded, StageStarted
at = []
def tell(event):
    if isinstance(event, (StageStarted, RoundEnded)):
        at.append(time.perf_counter())
fedstrata.run(sys.argv[1], progress=tell)
made = {"start": at[0] - float(os.environ["BEGAN"]), "round": (at[-1] - at[1]) / (len(at) - 2)}
with open(os.environ["OUT"] + "/result.json", "w") as file:
    json.dump(made, file)
"""
"""``perf_counter`` has one zero for all processes of a machine."""


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        clients: how many there are.
        asked: how many train in a round.
        about: what is not plain FedAvg about it.
        tables: keys of the job.
    """

    clients: int
    asked: int
    about: str = ""
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


CASES = {
    "10": Case(10, 10),
    "100": Case(100, 100),
    "1000": Case(1_000, 1_000),
    "1000/100": Case(1_000, 100),
    "10000/100": Case(10_000, 100),
    "100000/100": Case(100_000, 100),
    "private": Case(1_000, 1_000, "FedSplitBERT", {"method": {"name": "fedsplitbert"}}),
    "residuals": Case(1_000, 1_000, "1 bit with residuals", {"wire": {"codec": "delta", "bits": 1}}),
    "10000": Case(10_000, 10_000),
}


def job_of(case: Case, folder: Path, rounds: int) -> Path:
    """A job file, with its model and rows beside it: two rows a client, at least 1,000."""
    path = shaped_job(folder, case.clients, max(1_000, 2 * case.clients), SIZE, rounds, case.asked / case.clients)
    job = tomllib.loads(path.read_text("utf-8"))
    random_model("small", folder / "model")
    job["model"] = {"name": str(folder / "model")}
    job |= {name: {**job.get(name, {}), **table} for name, table in case.tables.items()}
    path.write_text(tomli_w.dumps(job), "utf-8")
    return path


def run(case: Case, folder: Path) -> dict[str, float]:
    """One run: seconds of its start, of a round and of its page; bytes of memory, disk and page."""
    path = job_of(case, folder, ROUNDS)
    out = folder / "out"
    out.mkdir()
    found = measure([sys.executable, "-c", RUN, str(path)], {"BEGAN": str(time.perf_counter())}, out, 3_600)
    if found.failed:
        raise SystemExit(f"{case}: {found.failed}")
    made = folder / "run"
    disk = sum(file.stat().st_blocks * 512 for file in made.rglob("*") if file.is_file())
    page = seconds([sys.executable, "-m", "fedstrata", "report", str(made)])
    return {**found.result, "memory": found.peak, "disk": disk, "page": page}


def forecast(folder: Path) -> float:
    """Seconds of a forecast of 1,000 rounds with 100 of 10,000 clients each."""
    job = job_of(Case(10_000, 100), folder, 1_000)
    return seconds([sys.executable, "-m", "fedstrata", "forecast", str(job)])


def table(report: dict[str, Any]) -> str:
    """The page's table, as Markdown."""
    lines = [
        "| clients | trained a round | | start, s | round, s | a client, ms | memory, GB | disk, MB | page, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in report["runs"].items():
        case = CASES[name]

        def told(key: str, digits: int, unit: float = 1.0, runs: list[dict[str, float]] = runs) -> str:
            values = [one[key] / unit for one in runs]
            return ranged(values, digits) if len(values) > 1 else f"{values[0]:.{digits}f}"

        row = [f"{case.clients:,}", f"{case.asked:,}", case.about, told("start", 1), told("round", 2)]
        row += [told("round", 1, case.asked / 1e3), told("memory", 2, 1e9), told("disk", 0, 1e6), told("page", 1)]
        lines.append(f"| {' | '.join(row)} |")
    if report["forecast"]:
        said = ranged(report["forecast"], 1) if len(report["forecast"]) > 1 else f"{report['forecast'][0]:.1f}"
        lines += ["", f"A forecast of 1,000 rounds with 100 of 10,000 clients each: {said} s."]
    return "\n".join(lines)


def main() -> None:
    """Measure, or write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default=",".join(CASES), help=f"of: {', '.join(CASES)}")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--table", type=Path, help="a file of figures, to make the page's table of")
    chosen = options.parse_args()
    if chosen.table:
        made = table(json.loads(chosen.table.read_text("utf-8")))
        PAGE.write_text(fill(PAGE.read_text("utf-8"), NAME, made), "utf-8")
        return
    names = chosen.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        options.error(f"--only: no case {unknown[0]!r}; expected some of: {', '.join(CASES)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    report: dict[str, Any] = {"machine": machine(), "commit": commit, "runs": {}, "forecast": []}
    for _ in range(chosen.repeats):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found = run(CASES[name], Path(folder))
            report["runs"].setdefault(name, []).append(found)
            print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report["forecast"].append(forecast(Path(folder)))
        print("forecast", {key: round(value, 1) for key, value in summary(report["forecast"]).items()}, flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1), "utf-8")


if __name__ == "__main__":
    main()
