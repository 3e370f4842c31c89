"""What methods give away: ``fedstrata audit`` of jobs, over seeds; docs/results/privacy.md has the table.

    python benchmarks/audit.py measure --model demo:minilm --out results.jsonl [--seeds 0,1,2]
    python benchmarks/audit.py table results.jsonl

Text of the clients: definitions of the Human Phenotype Ontology (the demo's), six clients by Dirichlet 0.5 over
organ systems, of which the first is audited. Public text: Python's documentation. Each round has 10 steps of 8
texts of at most 48 tokens, in fp32 and with dropout, unless the row says otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import fedstrata

RAW = {"optimizer": "sgd", "learning_rate": 10.0, "dropout": False, "steps": 1}
"""One step of plain SGD at so high a rate that fp32 rounds little off: what arrives is the gradient."""
HIDDEN = {"client": {"may_send": ["hidden_states"]}}
CLASSIFY: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": {"name": "fedavg"}},
    "FedAvg, one SGD step": {"method": {"name": "fedavg"}, "train": RAW},
    "FedAvg, int8": {"method": {"name": "fedavg"}, "wire": {"dtype": "int8"}},
    "FedAvg, delta 1 %": {"method": {"name": "fedavg"}, "wire": {"codec": "delta", "density": 0.01}},
    "FedProx": {"method": {"name": "fedprox"}},
    "FedSplitBERT": {"method": {"name": "fedsplitbert"}},
    "FedBT": {"method": {"name": "fedbt"}},
    "D-FedFreezeBERT": {"method": {"name": "fedfreezebert"}},
    "C-FedFreezeBERT, P-SUM": {"method": {"name": "fedfreezebert", "variant": "centralized"}, **HIDDEN},
    "C-FedFreezeBERT, mean": {
        "method": {"name": "fedfreezebert", "variant": "centralized", "head": "mean"},
        **HIDDEN,
    },
    "FedAvg, LoRA 8": {"method": {"name": "fedavg"}, "adapter": {"kind": "lora"}},
    "FedAvg, LoRA 8, one SGD step": {"method": {"name": "fedavg"}, "adapter": {"kind": "lora"}, "train": RAW},
}
MLM: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": {"name": "fedavg"}},
    "FedBFPT": {"method": {"name": "fedbfpt"}},
    "FedBFPT, one SGD step": {"method": {"name": "fedbfpt"}, "train": RAW},
    "FedBERT": {"method": {"name": "fedbert"}},
    "FedBERT, 4 lower layers": {"method": {"name": "fedbert", "lower": 4}},
}


def job(model: str, kind: str, tables: dict[str, Any], seed: int, folder: str) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"name": model},
        "data": {"train": "demo:hpo-train", "test": "demo:hpo-test"},
        "clients": {"count": 6, "partition": "dirichlet", "alpha": 0.5},
        "task": {"kind": kind},
        "method": {"rounds": 3},
        "train": {"steps": 10, "batch_size": 8, "max_tokens": 48, "precision": "fp32", "seed": seed},
        "output": {"dir": folder},
    }
    base["train"]["learning_rate"] = 1e-4
    return {name: {**base.get(name, {}), **tables.get(name, {})} for name in {**base, **tables}}


def measure(model: str, out: Path, only: set[str], seeds: list[int]) -> None:
    out.touch()
    done = {(r["model"], r["task"], r["row"], r["seed"]) for r in map(json.loads, out.read_text().splitlines())}
    for seed in seeds:
        for kind, rows in (("classify", CLASSIFY), ("mlm", MLM)):
            for row, tables in rows.items():
                key = (Path(model).name, kind, row, seed)
                if key in done or (only and row not in only):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    found = fedstrata.audit(job(model, kind, tables, seed, folder))
                line = dict(zip(("model", "task", "row", "seed"), key, strict=True))
                with out.open("a") as file:
                    file.write(
                        json.dumps({**line, "seconds": found["seconds"], "stage": found["stages"][0]}) + "\n"
                    )
                print(*key, f"{found['seconds']:.0f} s", flush=True)


def table(out: Path) -> None:
    """A line for each job, channel, round and attack: the mean over the seeds, and ends."""
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, out.read_text().splitlines()):
        for finding in line["stage"]["findings"]:
            where = (line["model"], line["task"], line["row"], finding["channel"], finding["setting"])
            cells[(*where, finding["attack"])].append(finding["figures"])
    before: tuple[str, ...] = ()
    for key, found in cells.items():
        if key[0] != (before or ("",))[0]:
            print(f"\n### {key[0]}\n\n| task, method | read from | round | attack | figures | seeds |")
            print("|---|---|---|---|---|---|")
        words = ", ".join(word for name in (found[0] or {}) if (word := _cell(name, found)))
        row = [f"{key[1]}, {key[2]}", key[3].replace("_", " "), *key[4:], words or "nothing", str(len(found))]
        print(f"| {' | '.join(row)} |")
        before = key


def _cell(name: str, found: list[dict[str, Any]]) -> str:
    values = [f[name]["value"] for f in found if name in f and f[name]["value"] is not None]
    if not values:
        return ""
    spread = f" ({min(values):.2f}–{max(values):.2f})" if max(values) - min(values) >= 0.005 else ""
    chance = [f[name]["chance"] for f in found if name in f and f[name]["chance"] is not None]
    beside = f" [chance {statistics.fmean(chance):.2f}]" if chance and name not in ("auc", "exact texts") else ""
    return f"{name} {statistics.fmean(values):.3f}{spread}{beside}"


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", default="demo:minilm")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--only", default="")
    measuring.add_argument("--seeds", default="0,1,2")
    commands.add_parser("table").add_argument("out", type=Path)
    asked = parser.parse_args()
    if asked.command == "table":
        table(asked.out)
    else:
        rows = {row for row in asked.only.split(";") if row}
        measure(asked.model, asked.out, rows, [int(seed) for seed in asked.seeds.split(",")])


if __name__ == "__main__":
    main()
