"""Score against epsilon: what noise costs, by method, number of clients and level; docs/privacy.md has the table.

    python benchmarks/epsilon.py measure --data FOLDER [--only "sst2,6 clients"] [--seconds 99]
    python benchmarks/epsilon.py table

Data sets are the demo's definitions of diseases (``hpo``) and each folder in FOLDER with ``train.jsonl`` and
``test.jsonl`` (``text``, ``label``; lines in random order). Of the training rows the first are the clients', the
next ones the development rows. Cells that the results have are not measured again.

Each method and level is tuned by itself on the development rows (seed 100): without noise and at level ``example``
its learning rate, at level ``client`` its clip, with the rate found without noise. What was found for epsilon 8 is
taken for other epsilons.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fedstrata
from fedstrata.data import demo
from fedstrata.privacy.accounting import calibrate

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "epsilon.jsonl"
TRAIN_ROWS, DEVELOPMENT_ROWS, TEST_ROWS = 2400, 500, 872
ROUNDS, SEEDS, TUNING_SEED, DELTA, MOST, EXAMPLE_CLIP = 3, (0, 1, 2), 100, 1e-5, 240, 0.1
"""``MOST`` clients take part in a round."""
METHODS: dict[str, dict[str, Any]] = {
    "head": {"method": {"name": "fedfreezebert"}},
    "adapters": {
        "method": {"name": "fedavg"},
        "adapter": {"kind": "lora", "rank": 4, "merge": "freeze_a"},
    },
    "FedBT": {"method": {"name": "fedbt"}},
    "FedAvg": {"method": {"name": "fedavg"}},
}
RATES = {
    "head": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
    "adapters": (1e-3, 3e-3, 1e-2, 3e-2),
    "FedBT": (1.5e-4, 5e-4, 1.5e-3, 5e-3),
    "FedAvg": (3e-5, 1e-4, 3e-4, 1e-3),
}
CLIPS = {
    "head": (0.3, 1.0, 3.0, 9.0),
    "adapters": (0.7, 2.0, 6.0),
    "FedBT": (1.0, 3.0, 9.0),
    "FedAvg": (1.5, 4.5, 13.5),
}
"""Around the length of the change that a client without noise sends."""
STEPS = {6: (8, 64), 60: (8, 8), 600: (2, 4)}
"""Clients -> steps of a round, and examples of a step."""
LEVELS: tuple[tuple[str, float | None], ...] = (("none", None), ("example", 8.0), ("client", 8.0))
COLUMNS = (*LEVELS, ("example", 2.0), ("client", 2.0))


@dataclass(frozen=True)
class Cell:
    """One run; ``tuning`` ones are scored on development rows, and ``clip`` is that of level ``client``."""

    data: str
    clients: int
    method: str
    level: str
    epsilon: float | None
    rate: float
    clip: float
    seed: int

    @property
    def tuning(self) -> bool:
        """Whether it is one that the choice of settings rests on."""
        return self.seed == TUNING_SEED

    def words(self) -> str:
        """Its name, for ``--only`` and the screen."""
        level = f"{self.level} {self.epsilon:g}" if self.epsilon else self.level
        what = f"{self.data}, {self.clients} clients, {self.method}, {level}"
        return f"{what}, rate {self.rate:g}, clip {self.clip:g}, seed {self.seed}"


Scores = dict[Cell, float]


def candidates(data: str, clients: int, method: str, level: str, scores: Scores) -> list[Cell]:
    """What is tried for ``level`` on development rows; nothing while the rate without noise is not known."""
    if level == "client":
        plain = best(data, clients, method, "none", scores)
        tried = [(plain.rate, clip) for clip in CLIPS[method]] if plain else []
    else:
        tried = [(rate, EXAMPLE_CLIP) for rate in RATES[method]]
    epsilon = dict(LEVELS)[level]
    return [Cell(data, clients, method, level, epsilon, rate, clip, TUNING_SEED) for rate, clip in tried]


def best(data: str, clients: int, method: str, level: str, scores: Scores) -> Cell | None:
    """The candidate with the highest score, the first of equal ones; None until all have been tried."""
    tried = candidates(data, clients, method, level, scores)
    if not tried or any(cell not in scores for cell in tried):
        return None
    return max(tried, key=lambda cell: scores[cell])


def cells(names: list[str], scores: Scores) -> Iterator[Cell]:
    """Every cell, tuning before what it decides; ``scores`` grows while they are taken."""
    for data in names:
        for clients in STEPS:
            for method in METHODS:
                for level, _ in LEVELS:
                    yield from candidates(data, clients, method, level, scores)
                for seed in SEEDS:
                    for level, epsilon in COLUMNS:
                        if found := best(data, clients, method, level, scores):
                            yield Cell(data, clients, method, level, epsilon, found.rate, found.clip, seed)


def rows_of(name: str, folder: Path | None) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All training rows and all test rows, each with ``text`` and ``label``."""
    if name == "hpo":
        columns = [demo.rows(f"hpo-{part}") for part in ("train", "test")]
        train, test = (
            [{"text": text, "label": label} for text, label in zip(part["text"], part["label"], strict=True)]
            for part in columns
        )
        return spread(train), test
    assert folder is not None
    train, test = (
        [json.loads(line) for line in (folder / name / f"{part}.jsonl").read_text("utf-8").splitlines()]
        for part in ("train", "test")
    )
    return train, test


def spread(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same rows in an order that does not follow the file's: by strides of the golden ratio."""
    stride = next(s for s in range(int(len(rows) * 0.618), 0, -1) if math.gcd(s, len(rows)) == 1)
    return [rows[i * stride % len(rows)] for i in range(len(rows))]


def job(cell: Cell, folder: Path | None, work: str) -> dict[str, Any]:
    train, test = rows_of(cell.data, folder)
    scored = train[TRAIN_ROWS:][:DEVELOPMENT_ROWS] if cell.tuning else test[:TEST_ROWS]
    paths = {}
    for part, rows in (("train", train[:TRAIN_ROWS]), ("test", scored)):
        paths[part] = f"{work}/{part}.jsonl"
        Path(paths[part]).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    own = METHODS[cell.method]
    steps, batch = STEPS[cell.clients]
    training = {"learning_rate": cell.rate, "steps": steps, "batch_size": batch, "max_tokens": 48}
    return {
        "model": {"name": "demo:minilm"},
        "data": paths,
        "clients": {"count": cell.clients, "fraction": min(1.0, MOST / cell.clients)},
        "task": {"kind": "classify", "metric": "accuracy", "labels": sorted({row["label"] for row in train})},
        "method": {**own["method"], "rounds": ROUNDS},
        "head": {"kind": "mean"},
        "adapter": own.get("adapter", {}),
        "train": {**training, "seed": cell.seed, "precision": "fp32"},
        "privacy": privacy(cell, min(cell.clients, MOST)),
        "server": {"evaluate": "end"},
        "engine": {"name": "inprocess", "threads": 1},
        "output": {"dir": f"{work}/run"},
    }


def privacy(cell: Cell, clients: int) -> dict[str, Any]:
    if cell.level == "none":
        return {}
    bound = {"level": cell.level, "clip": cell.clip, "delta": DELTA}
    if cell.level == "example":
        return {**bound, "epsilon": cell.epsilon, "participations": ROUNDS}
    assert cell.epsilon is not None
    share = calibrate(cell.epsilon, DELTA, "rdp", 1.0, ROUNDS) / math.sqrt(clients)
    return {**bound, "noise": share, "single_message": True}


def read(results: Path) -> Scores:
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    return {Cell(**line["cell"]): line["score"] for line in map(json.loads, lines)}


def measure(folder: Path | None, results: Path, only: list[str], seconds: float) -> None:
    scores, started = read(results), time.monotonic()
    names = ["hpo", *sorted(path.name for path in folder.iterdir() if path.is_dir())] if folder else ["hpo"]
    for cell in cells(names, scores):
        if cell in scores or not all(word in cell.words() for word in only):
            continue
        if time.monotonic() - started > seconds:
            return
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            run = fedstrata.run(job(cell, folder, work))
        scores[cell] = run.score["accuracy"]
        line = {"cell": asdict(cell), "score": scores[cell], "up": run.bytes["up"]}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        print(cell.words(), f"{scores[cell]:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def table(results: Path) -> None:
    """A line for each data set, number of clients and method: mean ± sd over the seeds, and how many there are."""
    found: dict[tuple[str, int, str], dict[tuple[str, float | None], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    scores = read(results)
    for cell, score in scores.items():
        if not cell.tuning:
            found[cell.data, cell.clients, cell.method][cell.level, cell.epsilon].append(score)
    heads = ["no noise", *(f"{level}, {epsilon:g}" for level, epsilon in COLUMNS[1:])]
    print(f"| data | clients | sent | {' | '.join(heads)} | rate; rate; clip |\n|{'---|' * (len(heads) + 4)}")
    for key, row in found.items():
        values = [_tuned(*key, level, scores) for level, _ in LEVELS]
        columns = " | ".join(_score(row[column]) for column in COLUMNS)
        print(f"| {key[0]} | {key[1]} | {key[2]} | {columns} | {'; '.join(values)} |")


def _tuned(data: str, clients: int, method: str, level: str, scores: Scores) -> str:
    """What was chosen, with a star at an end of what was tried."""
    found, tried = best(data, clients, method, level, scores), candidates(data, clients, method, level, scores)
    if not found:
        return ""
    star = "*" if found in (tried[0], tried[-1]) else ""
    return f"{found.clip if level == 'client' else found.rate:g}{star}"


def _score(scores: list[float]) -> str:
    if not scores:
        return ""
    seeds = "" if len(scores) == len(SEEDS) else f" ({len(scores)} of {len(SEEDS)} seeds)"
    return f"{statistics.fmean(scores):.3f}" + (f" ± {statistics.stdev(scores):.3f}" if scores[1:] else "") + seeds


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "table"):
        commands.add_parser(name).add_argument("--results", type=Path, default=RESULTS)
    measuring = commands.choices["measure"]
    measuring.add_argument("--data", type=Path, help="a folder with one for each data set beside the demo's")
    measuring.add_argument("--only", default="", help="parts of a cell's words, with commas")
    measuring.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    asked = parser.parse_args()
    if asked.command == "table":
        table(asked.results)
    else:
        measure(asked.data, asked.results, [word for word in asked.only.split(",") if word], asked.seconds)


if __name__ == "__main__":
    main()
