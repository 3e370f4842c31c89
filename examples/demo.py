"""Trains the same classifier over six hospitals in two ways, compared in one table and one page.

    python examples/demo.py [FOLDER] [KEY=VALUE ...]

FedBFPT then FedBT, as in ``configs/demo.toml``; and FedAvg twice. ``demo_rates.py`` compares learning rates for
each on development rows (docs/results/demo.md).
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

import fedstrata
from fedstrata.cli.progress import Display
from fedstrata.reports.page import write_page
from fedstrata.reports.runs import load_run
from fedstrata.reports.tables import result_table

JOB = Path(__file__).parent.parent / "configs" / "demo.toml"
VARIANTS: dict[str, dict[str, Any]] = {
    "fedbfpt-fedbt": {},
    "fedavg-fedavg": {
        "pretrain.method.name": "fedavg",
        "pretrain.train.learning_rate": 1e-4,
        "finetune.method.name": "fedavg",
        "finetune.train.learning_rate": 3e-4,
    },
}
"""Variant -> keys over the job."""


def main(folder: Path = Path("runs/demo"), *overrides: str) -> None:
    """Run both and compare them."""
    console = Console(highlight=False)
    job = tomllib.loads(JOB.read_text(encoding="utf-8"))
    for name in VARIANTS:
        shutil.rmtree(folder / name, ignore_errors=True)  # left by an earlier demo
    with Display(console) as display:
        for name, changes in VARIANTS.items():
            console.print(f"\n{name}", style="bold")
            pairs = [f"{key}={value}" for key, value in changes.items()]
            fedstrata.run(job, [*pairs, *overrides, f"output.dir={folder / name}"], progress=display)
    runs = [load_run(folder / name) for name in VARIANTS]
    console.print(result_table(runs))
    console.print(f"report  {write_page(runs, folder / 'report.html')}", soft_wrap=True)


if __name__ == "__main__":
    main(*(Path(word) if i == 0 else word for i, word in enumerate(sys.argv[1:])))
