"""Score against epsilon: what noise costs, by method, number of clients and level; docs/privacy.md has the table.

    python benchmarks/epsilon.py measure --data FOLDER --out results.jsonl [--only "sst2,6 clients"] [--seconds 99]
    python benchmarks/epsilon.py table results.jsonl

FOLDER holds a folder for each data set, with ``train.jsonl`` and ``test.jsonl`` (``text``, ``label``); of both the
first rows are used. Cells that ``results.jsonl`` has are not measured again.

At level ``client`` epsilon is that of the sum of a round's clients, each of which adds its share of the noise. The
sum is taken without masks, which would open to the same numbers: the score is that of ``sum_only`` with
``honest`` = all clients of the round, but for the rounding to whole steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedstrata
from fedstrata.privacy.accounting import calibrate

TRAIN_ROWS, TEST_ROWS, ROUNDS, SEEDS, DELTA, MOST = 2400, 500, 3, (0, 1, 2), 1e-5, 240
"""``MOST`` clients take part in a round."""
METHODS: dict[str, dict[str, Any]] = {
    "head": {"method": {"name": "fedfreezebert"}, "train": {"learning_rate": 3e-2}},
    "adapters": {
        "method": {"name": "fedavg"},
        "adapter": {"kind": "lora", "rank": 4, "merge": "freeze_a"},
        "train": {"learning_rate": 3e-3},
    },
    "FedBT": {"method": {"name": "fedbt"}, "train": {"learning_rate": 5e-4}},
    "FedAvg": {"method": {"name": "fedavg"}, "train": {"learning_rate": 3e-4}},
}
CLIP = {"head": 0.5, "adapters": 0.5, "FedBT": 0.5, "FedAvg": 0.5}
"""Longest change of a client's message, near what clients without noise send."""
STEPS = {6: (3, 64), 60: (1, 20), 600: (1, 4)}
"""Clients -> steps of a round, and examples of a step: few and large, as noise wants."""
NOISE = (("example", 8.0), ("client", 8.0), ("example", 2.0))
Cell = tuple[str, int, str, str, float, int]


def cells(data: Path) -> Iterator[Cell]:
    """Data set, clients, method, level, epsilon and seed of every cell, those first that tell most."""
    sets = sorted(path.name for path in data.iterdir() if path.is_dir())
    for seed in SEEDS:
        for name in reversed(sets):
            for clients, methods in ((6, METHODS), (60, METHODS), (600, ("head",))):
                for method in methods:
                    yield name, clients, method, "none", math.inf, seed
                    for level, epsilon in NOISE:
                        yield name, clients, method, level, epsilon, seed


def job(cell: Cell, data: Path, folder: str) -> dict[str, Any]:
    name, clients, method, level, epsilon, seed = cell
    own = METHODS[method]
    steps, batch = STEPS[clients]
    rows = {}
    for part, count in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        lines = (data / name / f"{part}.jsonl").read_text("utf-8").splitlines()[:count]
        rows[part] = Path(folder) / f"{part}.jsonl"
        rows[part].write_text("\n".join(lines) + "\n", "utf-8")
    labels = sorted({json.loads(line)["label"] for line in rows["train"].read_text("utf-8").splitlines()})
    return {
        "model": {"name": "demo:minilm"},
        "data": {part: str(path) for part, path in rows.items()},
        "clients": {"count": clients, "fraction": min(1.0, MOST / clients)},
        "task": {"kind": "classify", "metric": "accuracy", "labels": labels},
        "method": {**own["method"], "rounds": ROUNDS},
        "head": {"kind": "mean"},
        "adapter": own.get("adapter", {}),
        "train": {**own["train"], "steps": steps, "batch_size": batch, "max_tokens": 48, "seed": seed},
        "privacy": privacy(method, level, epsilon, min(clients, MOST)),
        "server": {"evaluate": "end"},
        "engine": {"threads": 1},
        "output": {"dir": f"{folder}/run"},
    }


def privacy(method: str, level: str, epsilon: float, clients: int) -> dict[str, Any]:
    if level == "none":
        return {}
    if level == "example":
        return {"level": level, "clip": 0.1, "epsilon": epsilon, "delta": DELTA, "participations": ROUNDS}
    share = calibrate(epsilon, DELTA, "rdp", 1.0, ROUNDS) / math.sqrt(clients)
    return {"level": level, "clip": CLIP[method], "noise": share, "delta": DELTA, "single_message": True}


def words(cell: Cell) -> str:
    name, clients, method, level, epsilon, seed = cell
    return f"{name}, {clients} clients, {method}, {level} {epsilon:g}, seed {seed}"


def measure(data: Path, out: Path, only: list[str], seconds: float) -> None:
    out.touch()
    done, started = {line["cell"] for line in map(json.loads, out.read_text().splitlines())}, time.monotonic()
    for cell in cells(data):
        if words(cell) in done or not all(word in words(cell) for word in only):
            continue
        if time.monotonic() - started > seconds:
            return
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            run = fedstrata.run(job(cell, data, folder))
        keys = dict(zip(("set", "clients", "method", "level", "epsilon", "seed"), cell, strict=True))
        line = {"cell": words(cell), **keys, "score": run.score["accuracy"], "up": run.bytes["up"]}
        with out.open("a") as file:
            file.write(json.dumps({**line, "seconds": time.monotonic() - began}) + "\n")
        print(words(cell), f"{line['score']:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def table(out: Path) -> None:
    """A line for each data set, number of clients and method: mean and ends over the seeds."""
    found: dict[tuple[str, int, str], dict[tuple[str, float], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in map(json.loads, out.read_text().splitlines()):
        row = found[line["set"], line["clients"], line["method"]]
        row[line["level"], line["epsilon"]].append(line["score"])
    columns = [("none", math.inf), *NOISE]
    heads = ["no noise", *(f"{level}, {epsilon:g}" for level, epsilon in columns[1:])]
    print(f"| data | clients | sent | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 3)}")
    for (name, clients, method), row in found.items():
        print(f"| {name} | {clients} | {method} | {' | '.join(_cell(row[column]) for column in columns)} |")


def _cell(scores: list[float]) -> str:
    if not scores:
        return ""
    spread = f" ({min(scores):.3f}–{max(scores):.3f})" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--data", type=Path, required=True)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--only", default="", help="parts of a cell's words, with commas")
    measuring.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    commands.add_parser("table").add_argument("out", type=Path)
    asked = parser.parse_args()
    if asked.command == "table":
        table(asked.out)
    else:
        measure(asked.data, asked.out, [word for word in asked.only.split(",") if word], asked.seconds)


if __name__ == "__main__":
    main()
