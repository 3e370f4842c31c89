"""Chooses the demo's learning rates, for each method by itself, on development rows.

    python examples/demo_rates.py [FOLDER] [KEY=VALUE ...]

Development rows are a tenth of the training rows, another tenth for every seed; no test row is read. First the
rates of further pre-training are compared by their loss, then, starting from the best, those of fine-tuning by
macro-F1: the best mean over the seeds. What it prints is in docs/results/demo.md; the rates stand in
configs/demo.toml and examples/demo.py.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from demo import FEDAVG, JOB, alone

import fedstrata
from fedstrata.events import CellEnded

SEEDS = [100, 101, 102]
PRETRAIN = [1e-4, 2e-4, 4e-4, 8e-4]
FINETUNE = {"fedbt": [5e-4, 1e-3, 2e-3, 4e-3], "fedavg": [1e-4, 2e-4, 3e-4, 5e-4]}
METHODS = {name: value for name, value in FEDAVG.items() if name.endswith("method.name")}
VARIANTS = {"fedbfpt-fedbt": {}, "fedavg-fedavg": METHODS, "fedbt-alone": {}}


def compared(
    job: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path, *overrides: str
) -> dict[str, list[float]]:
    """Row -> its scores in the last stage, one per seed, on development rows."""
    data = {key: value for key, value in job["data"].items() if key != "test"}
    content = {**job, "data": data, "sweep": {"seeds": SEEDS, "parallel": 2, "rows": list(rows)}}

    def progress(event: Any) -> None:
        if isinstance(event, CellEnded):
            print(f"{event.cell}: {event.status}, {event.seconds:.0f} s {event.message or ''}", flush=True)

    table = fedstrata.sweep(content, [f"output.dir={folder}", *overrides], resume=True, progress=progress)
    return {row.row: list(row.scores) for row in table if row.stage == job["stages"][-1]["name"]}


def show(variant: str, key: str, metric: str, scores: dict[float, list[float]]) -> float:
    """Print a row for each rate; the best of them."""
    best = (min if metric == "loss" else max)(scores, key=lambda rate: fmean(scores[rate]))
    for rate, values in scores.items():
        mark = "chosen" if rate == best else ""
        spread = f"{fmean(values):.4f} ± {stdev(values):.4f}" if len(values) > 1 else str(values)
        print(f"| {variant} | {key} | {rate:g} | {metric} {spread} | {mark} |", flush=True)
    return best


def main(folder: Path = Path("runs/demo-rates"), *overrides: str) -> None:
    """Both stages, one after the other."""
    job = tomllib.loads(JOB.read_text(encoding="utf-8"))
    first = {**job, "stages": job["stages"][:1]}
    rows = [
        {"name": f"{name} {rate:g}", **keys, "pretrain.train.learning_rate": rate}
        for name, keys in VARIANTS.items()
        if name != "fedbt-alone"
        for rate in PRETRAIN
    ]
    rows = [{key: value for key, value in row.items() if not key.startswith("finetune")} for row in rows]
    scores = compared(first, rows, folder / "pretrain", *overrides)
    chosen = {}
    for name in ("fedbfpt-fedbt", "fedavg-fedavg"):
        by_rate = {rate: scores[f"{name} {rate:g}"] for rate in PRETRAIN}
        chosen[name] = show(name, "pretrain.train.learning_rate", "loss", by_rate)
    for name, keys in VARIANTS.items():
        method = keys.get("finetune.method.name", "fedbt")
        source = alone(job) if name == "fedbt-alone" else job
        start = {"pretrain.train.learning_rate": chosen[name]} if name in chosen else {}
        rows = [
            {"name": f"{name} {rate:g}", **keys, **start, "finetune.train.learning_rate": rate}
            for rate in FINETUNE[method]
        ]
        scores = compared(source, rows, folder / name, *overrides)
        by_rate = {rate: scores[f"{name} {rate:g}"] for rate in FINETUNE[method]}
        show(name, "finetune.train.learning_rate", "macro_f1", by_rate)


if __name__ == "__main__":
    main(*(Path(word) if i == 0 else word for i, word in enumerate(sys.argv[1:])))
