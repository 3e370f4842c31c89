"""A line per measurement in ``benchmarks/trend.jsonl``, so that a slower commit is seen.

    python benchmarks/peers.py --out peers.json
    python benchmarks/trend.py peers.json           # compare with the newest lines of this kind of machine
    python benchmarks/trend.py peers.json --add     # and append

Files of ``speed.py`` and of ``client_step.py`` have measures too.

Only ratios are compared, each of which comes from one interleaved run: seconds of two days say nothing. A measure
has become worse if all of it lies beyond all of what it was: its smallest ratio above the largest one then, or,
where more is better, its largest below the smallest. Exit status 1 says that some measure has.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TREND = Path(__file__).resolve().parent / "trend.jsonl"
Line = dict[str, Any]
MORE_IS_BETTER = ("merge / copy",)
SECONDS = ("import", "forecast", "beyond own work", "demo")
"""Measures that are no ratios: they stay out of the file."""


def lines_of(report: dict[str, Any], date: str) -> list[Line]:
    """A report's measures, a line each."""
    shared = {"commit": report["commit"], "date": date, "machine": report["machine"]}
    return [
        {**shared, "measure": row["measure"], **{key: row[key] for key in ("median", "min", "max")}}
        for row in report["measures"]
        if row["measure"] not in SECONDS
    ]


def compare(new: list[Line], old: list[Line]) -> list[tuple[str, Line, Line | None]]:
    """What became of each new line, with the newest older one of the same measure and kind of machine."""
    found = []
    for line in new:
        same = [o for o in old if o["measure"] == line["measure"] and o["machine"] == line["machine"]]
        before = max(same, key=lambda o: o["date"]) if same else None
        if before is None:
            verdict = "new"
        elif before["min"] <= line["max"] and line["min"] <= before["max"]:
            verdict = "within the spread"
        else:
            more = line["median"] > before["median"]
            verdict = "better" if more == (line["measure"] in MORE_IS_BETTER) else "worse"
        found.append((verdict, line, before))
    return found


def main() -> None:
    """Compare, and append where asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("reports", nargs="+", type=Path, help="files that benchmarks wrote with --out")
    options.add_argument("--add", action="store_true", help="append the measures to the trend file")
    options.add_argument("--trend", type=Path, default=TREND, help="the file")
    chosen = options.parse_args()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    reports = {path: json.loads(path.read_text("utf-8")) for path in chosen.reports}
    if without := [path for path, report in reports.items() if not {"measures", "commit"} <= report.keys()]:
        said = "has no measures of a commit; expected what peers.py, speed.py or client_step.py wrote"
        options.error(f"{without[0]}: {said}")
    new = [line for report in reports.values() for line in lines_of(report, date)]
    old = (
        [json.loads(line) for line in chosen.trend.read_text("utf-8").splitlines()]
        if chosen.trend.exists()
        else []
    )
    found = compare(new, old)
    for verdict, line, before in found:
        was = f" (was {before['median']:.3f}, {before['min']:.3f} to {before['max']:.3f})" if before else ""
        print(f"{verdict:17} {line['measure']}: {line['median']:.3f}, {line['min']:.3f} to {line['max']:.3f}{was}")
    if chosen.add:
        with chosen.trend.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
    sys.exit(any(verdict == "worse" for verdict, _, _ in found))


if __name__ == "__main__":
    main()
