"""The measures of speed that no other benchmark takes, and the table of all of them.

    python benchmarks/speed.py --out speed.json                       # merge, beyond, memory, start
    python benchmarks/speed.py --table speed.json peers.json step.json sites.json  # into docs/results

``merge``: the server's check and merge of replies, GB/s of fp32 weights, by those of a copy; one thread, in turn.
``beyond``: seconds of a round beyond the clients' own work, for each client, 87 MB of weights, in one process.
``memory``: peak memory of a run with 10,000 clients by that with 10, ten sampled in each round, same rows.
``start``: seconds of ``import fedstrata``, and of a forecast of BERT-base with two methods.
``demo``: seconds of ``fedstrata demo``.

The table's numbers all come from files; its words stand here and in the page. What no file has stays "–".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import ROOT
from measure import machine, measure, summary
from tables import fill

PAGE = ROOT / "docs" / "results" / "speed.md"
NAME = "benchmarks/speed.py --table"
Measures = dict[str, list[float]]


@dataclass(frozen=True)
class Target:
    """A row of the table.

    Attributes:
        about: the measure.
        before: what it was when the target was set.
        target: what is wanted, at most (with ``least`` at least).
        measure: its name in the files.
        bound: what bounds it where it is missed.
        least: more is better.
        unit: of the figures.
    """

    about: str
    before: str
    target: float
    measure: str
    bound: str = ""
    least: bool = False
    unit: str = ""


STEP = (
    "its FLOPs are 0.303 of the plain step's; it reaches 0.32 of the speed of a large bf16 product, which runs "
    "5.4 times as fast as one of fp32, of which the plain step reaches 0.60"
)
OWN_STEPS = "FLOPs are 0.371 of that step's"
FEDAVG = "its FLOPs are 0.816 of the plain step's; it reaches 0.31 of the speed of a large bf16 product"
MERGE = (
    "of 87 MB, which are copied in 14 ms, the check takes 7 and the sum 32, in which each element is cast to "
    "fp64, added in a core's cache, divided, and written to new memory"
)
JOB = (
    "of 17 s of one run 3.8 pass before the first round, 11.8 in the rounds, in which both cores train, 1.4 with "
    "the score, the model and the end"
)
THREE = (
    "two workers and the server have libraries and a model each; a run in one process takes 1.3 GB (row `epoch`)"
)
BEYOND = "check and sum take 0.04 s of it (the row above)"
START = (
    "of 6.9 s with 100 clients 3.7 pass before the first round; then a client takes 22 ms of a core, 17 of them "
    "its own two steps"
)
FORECAST = "importing transformers' BERT module takes 2.8 s of one core by itself"

TARGETS = (
    Target("FedBFPT step / plain fp32 step, BERT-base 8 × 128", "0.16–0.22", 0.09, "step: fedbfpt / plain", STEP),
    Target("FedBFPT step / own FedAvg step", "0.37–0.40", 0.33, "step: fedbfpt / fedavg", OWN_STEPS),
    Target("own FedAvg step / plain", "0.40–0.47", 0.25, "step: fedavg / plain", FEDAVG),
    Target("SST-2 lengths, MiniLM: own epoch / Trainer's", "–", 0.4, "epoch: epoch_seconds / Trainer loop"),
    Target("job of 10 clients, MiniLM / careful plain loop", "1.2–1.4", 0.75, "10: seconds / careful loop", JOB),
    Target(
        "job of 10 clients / plain loop as written", "0.69", 0.45, "as written: seconds / loop as written", JOB
    ),
    Target("job of 10 clients / Trainer loop", "1.1", 1.0, "10: seconds / Trainer loop"),
    Target("job of 10 clients / pfl-research", "1.0–1.2", 1.0, "10: seconds / pfl-research"),
    Target("job of 10 clients / Flower's simulator", "0.73–0.84", 0.4, "10: seconds / Flower", JOB),
    Target("its memory / Flower's simulator", "0.27", 0.3, "10: peak / Flower", THREE),
    Target("job of 10 clients / NVFlare's simulator", "–", 1.0, "10: seconds / NVFlare"),
    Target("100 clients, small model / Flower's simulator", "–", 0.1, "100: seconds / Flower", START),
    Target("1,000 clients, small model / Flower's simulator", "–", 0.1, "1000: seconds / Flower", START),
    Target("1,000 clients, small model / pfl-research", "–", 1.0, "1000: seconds / pfl-research"),
    Target("100 clients, small model / careful plain loop", "–", 1.0, "100: seconds / careful loop"),
    Target("1,000 clients, small model / careful plain loop", "–", 1.0, "1000: seconds / careful loop"),
    Target("FedBFPT, 10 clients / plain loop with its plan", "–", 1.0, "fedbfpt: seconds / careful loop"),
    Target("FedBT, 10 clients / plain loop with its plan", "–", 1.0, "fedbt: seconds / careful loop"),
    Target("merge with its checks, GB/s / those of a copy", "0.07", 0.5, "merge / copy", MERGE, least=True),
    Target("beyond own work, per client and round, 87 MB", "0.25 s", 0.03, "beyond own work", BEYOND, unit=" s"),
    Target("memory, 10,000 / 10 clients", "–", 1.1, "memory 10,000 / 10"),
    Target("FedBFPT round between sites beyond training, 31 MB", "5.0 s", 1.5, "sites: fedbfpt", unit=" s"),
    Target("FedAvg round between sites beyond training, 438 MB", "26.7 s", 8.0, "sites: fedavg", unit=" s"),
    Target(
        "memory of `run` beyond training / model of 438 MB",
        "12.7 in all",
        3.0,
        "sites memory: fedavg, run",
    ),
    Target("memory of `join` beyond training / model of 438 MB", "10.0 in all", 3.0, "sites memory: fedavg, join"),
    Target("`make demo` after the install", "3½ min", 90.0, "demo", unit=" s"),
    Target("`import fedstrata`", "0.03 s", 0.03, "import", unit=" s"),
    Target("forecast of BERT-base, two methods", "9 s", 3.0, "forecast", FORECAST, unit=" s"),
)


# ---- measures


def merge(repeats: int) -> Measures:
    """Replies of 87 and 438 MB: checked and merged, and the same bytes copied, in turn."""
    import torch

    from fedstrata.server.aggregate import make_aggregate
    from fedstrata.wire.codec import Wire, make_codec

    torch.set_num_threads(1)
    wire, found = Wire(make_codec("fp32")), []
    for elements, layers in ((21_800_000, 70), (109_500_000, 200)):
        shapes = {f"{i}": (elements // layers,) for i in range(layers)}
        reply = {name: torch.randn(shape) for name, shape in shapes.items()}
        into = {name: torch.empty(shape) for name, shape in shapes.items()}
        for turn in range(-1, repeats):
            started = time.perf_counter()
            for _ in range(3):
                for name, tensor in reply.items():
                    into[name].copy_(tensor)
            copied = time.perf_counter()
            aggregate = make_aggregate("mean")()
            for client in range(3):
                wire.check(reply, shapes)
                aggregate.add(wire.decode(reply), 10, str(client))
            aggregate.result()
            ended = time.perf_counter()
            if turn >= 0:
                found.append((copied - started) / (ended - copied))
    return {"merge / copy": found}


def beyond(repeats: int) -> Measures:
    """Rounds of 5 clients with MiniLM's shape; the first round is not counted."""
    script = """
import json, sys, time
import fedstrata
from fedstrata.events import Replied
at = []
def tell(event):
    if isinstance(event, Replied):
        at.append((event.round, time.perf_counter(), event.seconds))
fedstrata.run(sys.argv[1], ["engine.name=inprocess", f"output.dir={sys.argv[2]}"], progress=tell)
first = max(when for round, when, _ in at if round == 0)
later = [(when, own) for round, when, own in at if round > 0]
print(json.dumps((max(when for when, _ in later) - first - sum(own for _, own in later)) / len(later)))
"""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = shaped_job(folder, clients=5, rows=100, size=(6, 384, 12), rounds=4, fraction=1.0)
        for i in range(repeats):
            words = [sys.executable, "-c", script, str(job), str(folder / f"run-{i}")]
            found.append(float(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    return {"beyond own work": found}


def memory(repeats: int) -> Measures:
    """Runs of 2 rounds of 10 clients, out of 10 and out of 10,000, with the same rows."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for i in range(repeats):
            peaks = []
            for clients in (10, 10_000):
                folder = Path(name) / f"{clients}-{i}"
                job = shaped_job(folder, clients, rows=20_000, size=(2, 128, 2), rounds=2, fraction=10 / clients)
                out = folder / "out"
                out.mkdir()
                (out / "result.json").write_text("{}", "utf-8")
                run = "import fedstrata, sys; fedstrata.run(sys.argv[1])"
                made = measure([sys.executable, "-c", run, str(job)], {}, out, 300)
                if made.failed:
                    raise SystemExit(f"memory, {clients} clients: {made.failed}")
                peaks.append(made.peak)
            found.append(peaks[1] / peaks[0])
    return {"memory 10,000 / 10": found}


def shaped_job(
    folder: Path, clients: int, rows: int, size: tuple[int, int, int], rounds: int, fraction: float
) -> Path:
    """A job with made-up text and a model from a config, one step for each client."""
    import tomli_w
    from workloads import made_up, write_lines

    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "rows.jsonl", list(made_up(rows + 50, 6, 20)))
    layers, width, heads = size
    config = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": 30_522 if width > 128 else 2_000,
    }
    job = {
        "model": {"config": config},
        "task": {"kind": "classify"},
        "data": {"train": str(folder / "rows.jsonl"), "holdout": 50 / (rows + 50)},
        "clients": {"count": clients, "fraction": fraction},
        "method": {"name": "fedavg", "rounds": rounds},
        "train": {"steps": 1, "batch_size": 4, "max_tokens": 32, "device": "cpu"},
        "server": {"evaluate": "end"},
        "output": {"dir": str(folder / "run")},
    }
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(job), "utf-8")
    return path


def start(repeats: int) -> Measures:
    """Seconds of two commands; of the import, beyond those of starting Python."""
    from transformers import BertConfig

    imports, forecasts = [], []
    with tempfile.TemporaryDirectory() as name:
        BertConfig().save_pretrained(name)
        words = ["--model", name, "--task", "mlm", "--methods", "fedavg,fedbfpt", "--examples", "100"]
        for _ in range(repeats):
            empty, full = (seconds([sys.executable, "-c", code]) for code in ("pass", "import fedstrata"))
            imports.append(full - empty)
            forecasts.append(seconds([sys.executable, "-m", "fedstrata", "forecast", *words]))
    return {"import": imports, "forecast": forecasts}


def demo(repeats: int) -> Measures:
    """Seconds of the demo: two runs of six clients, and the page that compares them."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            found.append(seconds([sys.executable, "-m", "fedstrata", "demo", "--output", f"{name}/demo"]))
    return {"demo": found}


def seconds(command: list[str]) -> float:
    """Of a command, to its end."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


OWN = {"merge": merge, "beyond": beyond, "memory": memory, "start": start, "demo": demo}


# ---- the table


def known(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Measure -> median and range, in a file of any of the benchmarks."""
    found = {row["measure"]: row for row in report.get("measures", ())}
    if "steps" in report and any("clock_ratio" in step for step in report["steps"]):
        ratios = {name: step["clock_ratio"] for step in reversed(report["steps"]) for name in step["methods"]}
        plain = {name: summary([ratios[name]]) for name in ("fedbfpt", "fedavg")}
        found |= {f"step: {name} / plain": row for name, row in plain.items()}
        found["step: fedbfpt / fedavg"] = summary([ratios["fedbfpt"] / ratios["fedavg"]])
    for method, made in report.get("rounds", {}).get("methods", {}).items():
        found[f"sites: {method}"] = summary(made["sites"]["rounds"]["beyond"])
    return found


def cells(target: Target, row: dict[str, float] | None) -> list[str]:
    """A line of the table."""
    wanted = f"{'≥' if target.least else '≤'} {target.target:g}{target.unit}"
    if row is None:
        return [target.about, target.before, "–", wanted, target.bound]
    now = f"{row['median']:.3g}{target.unit}"
    if row["min"] != row["max"]:
        now += f" ({row['min']:.3g} to {row['max']:.3g})"
    met = row["median"] >= target.target if target.least else row["median"] <= target.target
    return [target.about, target.before, now, wanted, "met" if met else target.bound or "missed"]


def table(reports: list[dict[str, Any]]) -> str:
    """The table and its machine, as Markdown."""
    found: dict[str, dict[str, float]] = {}
    for report in reports:
        found |= known(report)
    lines = ["| measure | before | now | target | |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cells(target, found.get(target.measure))) + " |" for target in TARGETS]
    kinds = list(dict.fromkeys(json.dumps(report["machine"]) for report in reports if "machine" in report))
    for kind in map(json.loads, kinds):
        lines.append("")
        lines.append(
            f"Machine: {kind['processor']}, {kind['cores']} cores, {', '.join(kind['features'])}, "
            f"{kind['memory_gb']} GB; torch {kind['torch']}, Python {kind['python']}."
        )
    lines += [line for report in reports for line in peers_of(report)]
    return "\n".join(lines)


def peers_of(report: dict[str, Any]) -> list[str]:
    """The tables of ``benchmarks/peers.py``, row by row."""
    lines = []
    for name, found in report.get("workloads", {}).items():
        lines += ["", f"**{name}**: {found['about']}.", ""]
        lines += [f"| | seconds | memory, GB | {found['headline']} |", "|---|---|---|---|"]
        for peer, runs in found["runs"].items():
            if peer in found["failed"]:
                lines.append(f"| {peer} | {found['failed'][peer]} | | |")
            elif runs:
                values = ([run["seconds"] for run in runs], [run["peak"] / 1e9 for run in runs])
                score = summary([run["score"] for run in runs])["median"]
                lines.append(f"| {peer} | {ranged(values[0], 1)} | {ranged(values[1], 2)} | {score:.3f} |")
        if found["most_frequent"]:
            lines += ["", f"Always the most frequent class: {found['most_frequent']:.3f}."]
        apart = {peer: value for peer, value in found["apart"].items() if value is not None}
        if apart:
            said = ", ".join(f"{peer} {value:.1e}" for peer, value in apart.items())
            lines += ["", f"Final weights away from the careful loop's, by how far training moved them: {said}."]
    return lines


def ranged(values: list[float], digits: int) -> str:
    """Median and range."""
    found = summary(values)
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f} to {found['max']:.{digits}f})"


def main() -> None:
    """Measure, or write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default=",".join(OWN), help=f"of: {', '.join(OWN)}")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--out", type=Path, help="write the figures here")
    options.add_argument("--table", type=Path, nargs="+", help="files of benchmarks, to make the page's table of")
    chosen = options.parse_args()
    if chosen.table:
        reports = [json.loads(path.read_text("utf-8")) for path in chosen.table]
        PAGE.write_text(fill(PAGE.read_text("utf-8"), NAME, table(reports)), "utf-8")
        return
    if unknown := [name for name in chosen.only.split(",") if name not in OWN]:
        options.error(f"--only: no measure {unknown[0]!r}; expected some of: {', '.join(OWN)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    report: dict[str, Any] = {"machine": machine(), "commit": commit, "measures": []}
    for name in chosen.only.split(","):
        for what, values in OWN[name](chosen.repeats).items():
            report["measures"].append({"measure": what, **summary(values), "values": values})
            print(f"{what}: {ranged(values, 3)}", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(report, indent=1), "utf-8")


if __name__ == "__main__":
    main()
