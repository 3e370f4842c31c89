"""Chooses the demo's learning rates, for each method by itself, on development rows.

    python examples/demo_rates.py [VARIANT ...]

Development rows are a tenth of the training rows, another tenth for every seed; no test row is read. A rate of
further pre-training is tried with several of fine-tuning, and with more where the best stood at an end: the best
mean macro-F1 over the seeds counts. A call that was ended goes on. The rates stand in src/fedstrata/cli, demo.toml
and demo.py; what has been measured is in docs/results/demo.md.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedstrata
from fedstrata.cli.demo import JOB, VARIANTS
from fedstrata.events import CellEnded

FOLDER = Path("runs/demo-rates")
SEEDS = (100, 101)
GRID = {
    "fedbfpt-fedbt": {3e-5: (5e-4, 1e-3, 2e-3), 1e-4: (5e-4, 1e-3, 2e-3), 4e-4: (5e-4, 1e-3, 2e-3)},
    "fedavg-fedavg": {3e-5: (5e-4, 1e-3, 2e-3), 1e-4: (2e-4, 3e-4, 5e-4, 1e-3, 2e-3), 4e-4: (2e-4, 3e-4, 5e-4)},
}
"""Variant -> learning rate of further pre-training -> those of fine-tuning."""


def sweep_of(job: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The job with development rows in place of test rows, and a row for every pair of rates."""
    data = {key: value for key, value in job["data"].items() if key != "test"}  # a tenth is held out instead
    rows = [
        {
            "name": f"{first:g} {then:g}",
            **VARIANTS[variant],
            "pretrain.train.learning_rate": first,
            "finetune.train.learning_rate": then,
        }
        for first, rates in GRID[variant].items()
        for then in rates
    ]
    return {**job, "data": data, "sweep": {"seeds": list(SEEDS), "rows": rows}}


def main(*variants: str) -> None:
    """Compare the rates of these variants, by default of all."""
    job = tomllib.loads(JOB.read_text(encoding="utf-8"))

    def progress(event: Any) -> None:
        if isinstance(event, CellEnded):
            print(f"{event.cell}: {event.message or f'{event.seconds:.0f} s'}", file=sys.stderr, flush=True)

    for variant in variants or VARIANTS:
        keys = {"output.dir": str(FOLDER / variant)}
        table = fedstrata.sweep(sweep_of(job, variant), keys, resume=True, progress=progress)
        rows = [row for row in table if row.stage == "finetune" and row.mean is not None]
        chosen = max(rows, key=lambda row: row.mean or 0.0)
        for row in rows:
            mark = "chosen" if row is chosen else ""
            print(f"| {variant} | {' | '.join(row.row.split())} | {row.mean:.4f} ± {row.sd:.4f} | {mark} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
