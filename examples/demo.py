"""Trains the same classifier over six hospitals in three ways, compared in one table and one page.

    python examples/demo.py [FOLDER] [KEY=VALUE ...]

FedBFPT then FedBT; FedAvg then FedAvg; and FedBT without further pre-training. The job is ``configs/demo.toml``.
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
FEDAVG = {
    "pretrain.method.name": "fedavg",
    "finetune.method.name": "fedavg",
    "finetune.train.learning_rate": 5e-4,  # at FedBT's 1e-3 a whole model predicts at chance level
}


def alone(job: dict[str, Any]) -> dict[str, Any]:
    """The job without further pre-training."""
    return {**job, "stages": [stage for stage in job["stages"] if stage["name"] == "finetune"]}


def main(folder: Path = Path("runs/demo"), *overrides: str) -> None:
    """Run all three and compare them."""
    console = Console(highlight=False)
    job = tomllib.loads(JOB.read_text(encoding="utf-8"))
    variants = {"fedbfpt-fedbt": (job, {}), "fedavg-fedavg": (job, FEDAVG), "fedbt-alone": (alone(job), {})}
    for name in variants:
        shutil.rmtree(folder / name, ignore_errors=True)  # left by an earlier demo
    with Display(console) as display:
        for name, (content, changes) in variants.items():
            console.print(f"\n{name}", style="bold")
            pairs = [f"{key}={value}" for key, value in changes.items()]
            fedstrata.run(content, [*pairs, *overrides, f"output.dir={folder / name}"], progress=display)
    runs = [load_run(folder / name) for name in variants]
    console.print(result_table(runs))
    console.print(f"report  {write_page(runs, folder / 'report.html')}", soft_wrap=True)


if __name__ == "__main__":
    main(*(Path(word) if i == 0 else word for i, word in enumerate(sys.argv[1:])))
