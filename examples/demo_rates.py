"""Chooses the demo's learning rates, for each method by itself, on development rows.

    python examples/demo_rates.py [VARIANT ...]

Development rows are a tenth of the training rows, another tenth for every seed; no test row is read. First the
rates of further pre-training are compared by their loss, then, starting from the best, those of fine-tuning by
macro-F1: the best mean over the seeds. A call that was ended goes on. What it prints is in docs/results/demo.md;
the rates stand in configs/demo.toml and examples/demo.py.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from demo import JOB, VARIANTS

import fedstrata
from fedstrata.events import CellEnded

FOLDER = Path("runs/demo-rates")
SEEDS = (100, 101)
GRID = {
    "fedbfpt-fedbt": {"pretrain": (1e-4, 4e-4), "finetune": (1e-3, 2e-3, 4e-3)},
    "fedavg-fedavg": {"pretrain": (1e-4, 4e-4), "finetune": (2e-4, 3e-4, 5e-4)},
}
"""Variant -> stage -> learning rates."""
Scores = dict[float, list[float]]


def compared(
    job: Mapping[str, Any], stage: str, rates: Sequence[float], keys: Mapping[str, Any], folder: Path
) -> Scores:
    """Learning rate of a stage -> the stage's scores on development rows, one per seed."""
    names = [part["name"] for part in job["stages"]]
    data = {key: value for key, value in job["data"].items() if key != "test"}  # a tenth is held out instead
    rows = [{"name": f"{rate:g}", **keys, f"{stage}.train.learning_rate": rate} for rate in rates]
    content = {
        **job,
        "data": data,
        "stages": job["stages"][: names.index(stage) + 1],
        "sweep": {"seeds": list(SEEDS), "rows": rows},
    }

    def progress(event: Any) -> None:
        if isinstance(event, CellEnded):
            print(f"{event.cell}: {event.message or f'{event.seconds:.0f} s'}", file=sys.stderr, flush=True)

    table = fedstrata.sweep(content, {"output.dir": str(folder)}, resume=True, progress=progress)
    return {float(row.row): list(row.scores) for row in table if row.stage == stage}


def best(stage: str, scores: Scores) -> float:
    """The rate with the best mean: of pre-training the least loss, of fine-tuning the largest macro-F1."""
    means = {rate: fmean(values) for rate, values in scores.items()}
    return min(means, key=lambda rate: means[rate]) if stage == "pretrain" else max(means, key=lambda r: means[r])


def main(*variants: str) -> None:
    """Compare the rates of these variants, by default of all, stage by stage."""
    job = tomllib.loads(JOB.read_text(encoding="utf-8"))
    for variant in variants or VARIANTS:
        keys = {key: value for key, value in VARIANTS[variant].items() if "learning_rate" not in key}
        for stage, rates in GRID[variant].items():
            of_stage = {key: value for key, value in keys.items() if stage == "finetune" or key.startswith("pre")}
            scores = compared(job, stage, rates, of_stage, FOLDER / variant / stage)
            chosen = best(stage, scores)
            for rate, values in scores.items():
                mark = "chosen" if rate == chosen else ""
                print(f"| {variant} | {stage} | {rate:g} | {fmean(values):.4f} ± {stdev(values):.4f} | {mark} |")
            keys[f"{stage}.train.learning_rate"] = chosen


if __name__ == "__main__":
    main(*sys.argv[1:])
