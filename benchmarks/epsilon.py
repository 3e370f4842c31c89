"""Score against epsilon, and what an omission costs; docs/privacy.md has the tables.

    python benchmarks/epsilon.py measure [--sst2 FOLDER] [--only "sst2,6 clients"] [--seconds 99]
    python benchmarks/epsilon.py table

Data sets are the demo's definitions of diseases (``hpo``) and, where FOLDER has GLUE's ``train.tsv`` and
``dev.tsv`` of it, SST-2, whose labeled ``dev.tsv`` is the test. Of the training rows, put into another order, the
first are the clients', the next ones the development rows. Cells that the results have are not measured again.

Each method and level is tuned by itself on the development rows (seed 100): without noise and at level ``example``
its learning rate, at level ``client`` its clip, with the rate found without noise. What was found for epsilon 8 is
taken for other epsilons. Where one value is tried, nothing is tuned.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from audit import public_words
from tables import fill

import fedstrata
from fedstrata.data import demo
from fedstrata.privacy.accounting import calibrate

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, PAGE = DOCS / "results" / "epsilon.jsonl", DOCS / "privacy.md"
NOISE, OMITTED = "benchmarks/epsilon.py table", "benchmarks/epsilon.py table, omissions"
TRAIN_ROWS, DEVELOPMENT_ROWS, TEST_ROWS = 2400, 500, 872
ROUNDS, SEEDS, TUNING_SEED, DELTA, MOST, EXAMPLE_CLIP = 3, (0, 1, 2), 100, 1e-5, 240, 0.1
"""``MOST`` clients take part in a round."""
STEPS = {6: (8, 32), 60: (8, 4), 600: (2, 4)}
"""Clients -> steps of a round, and examples of a step."""
GROUPS = (("sst2", 60), ("sst2", 6), ("sst2", 600), ("hpo", 60), ("hpo", 6), ("hpo", 600))
"""Data and clients, in the order in which they are measured."""
METHODS: dict[str, dict[str, Any]] = {
    "head": {"method": {"name": "fedfreezebert"}},
    "adapters": {
        "method": {"name": "fedavg"},
        "adapter": {"kind": "lora", "rank": 4, "merge": "freeze_a"},
    },
    "FedBT": {"method": {"name": "fedbt"}},
    "FedAvg": {"method": {"name": "fedavg"}},
}
OMISSIONS = ("embeddings", "position_rows", "unlisted_rows")
"""What FedAvg of six clients leaves out, without noise."""
FEDAVG = (3e-5, 1e-4, 3e-4, 1e-3)
TRIED: dict[str, dict[str, tuple[float, ...]]] = {
    "head": {"none": (0.03, 0.1, 0.3), "example": (0.1, 0.3, 1.0), "client": (1.0, 3.0, 9.0)},
    "adapters": {"none": (1e-3, 3e-3, 1e-2), "example": (1e-3, 3e-3, 1e-2), "client": (0.7, 2.0, 6.0)},
    "FedBT": {"none": (1.5e-4, 5e-4, 1.5e-3), "example": (1.5e-4, 5e-4, 1.5e-3), "client": (3.0,)},
    "FedAvg": {"none": FEDAVG, "example": FEDAVG, "client": (4.5,)},
    **{f"FedAvg, omit {part}": {"none": FEDAVG} for part in OMISSIONS},
}
"""Learning rates, and clips around the length of the change that a client without noise sends."""
TRIED_THERE: dict[tuple[str, int, str, str], tuple[float, ...]] = {
    ("hpo", 6, "FedBT", "none"): (1.5e-4, 5e-4, 1.5e-3, 5e-3),
    ("hpo", 6, "FedBT", "example"): (1.5e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2),
    ("hpo", 6, "head", "client"): (1.0, 3.0, 9.0, 27.0),
    ("hpo", 60, "FedBT", "none"): (1.5e-4, 5e-4, 1.5e-3, 5e-3),
    ("hpo", 60, "FedBT", "example"): (1.5e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2),
    ("hpo", 60, "head", "none"): (0.03, 0.1, 0.3, 1.0, 3.0),
    ("hpo", 60, "adapters", "client"): (0.2, 0.7, 2.0, 6.0),
    ("sst2", 6, "head", "example"): (0.03, 0.1, 0.3, 1.0),
    ("sst2", 6, "head", "client"): (0.3, 1.0, 3.0, 9.0),
    ("sst2", 6, "adapters", "example"): (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ("sst2", 6, "adapters", "client"): (0.7, 2.0, 6.0, 18.0),
    ("sst2", 6, "FedBT", "none"): (5e-5, 1.5e-4, 5e-4, 1.5e-3),
    ("sst2", 6, "FedBT", "example"): (1.5e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2),
    ("sst2", 6, "FedAvg", "example"): (*FEDAVG, 3e-3, 1e-2),
    ("sst2", 60, "adapters", "example"): (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ("sst2", 60, "adapters", "client"): (0.2, 0.7, 2.0, 6.0),
    ("sst2", 600, "head", "example"): (0.1, 0.3, 1.0, 3.0, 10.0),
    ("sst2", 600, "head", "client"): (1.0, 3.0, 9.0, 27.0),
    ("sst2", 600, "adapters", "example"): (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    ("sst2", 600, "adapters", "client"): (0.2, 0.7, 2.0, 6.0),
    ("sst2", 600, "FedBT", "none"): (1.5e-4, 5e-4, 1.5e-3, 5e-3),
    ("sst2", 600, "FedBT", "example"): (1.5e-4, 5e-4, 1.5e-3, 1.5e-2, 5e-2, 1.5e-1, 5e-1),
    ("sst2", 600, "FedAvg", "none"): (*FEDAVG, 3e-3),
    ("sst2", 60, "head", "client"): (1.0, 3.0, 9.0, 27.0),
    ("hpo", 600, "head", "none"): (0.03, 0.1, 0.3, 1.0),
    ("hpo", 600, "head", "example"): (0.1, 0.3, 1.0, 3.0, 10.0),
    ("hpo", 600, "head", "client"): (1.0, 3.0, 9.0, 27.0, 81.0),
    ("hpo", 6, "adapters", "example"): (1e-3, 3e-3, 1e-2, 3e-2),
    ("hpo", 60, "adapters", "example"): (1e-3, 3e-3, 1e-2, 3e-2),
    ("hpo", 6, "FedAvg", "example"): (*FEDAVG, 3e-3),
    ("hpo", 600, "adapters", "none"): (1e-3, 3e-3, 1e-2, 3e-2),
    ("hpo", 600, "adapters", "example"): (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    ("hpo", 600, "FedBT", "none"): (5e-4, 1.5e-3, 5e-3, 1.5e-2),
    ("hpo", 600, "FedBT", "example"): (1.5e-3, 5e-3, 1.5e-2, 5e-2, 1.5e-1, 5e-1),
    ("hpo", 600, "FedAvg", "none"): (*FEDAVG, 3e-3, 1e-2),
    ("hpo", 600, "FedAvg", "example"): (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0),
}
"""In place of those, where their best lay, or by the other methods' runs would lie, at an end."""
COLUMNS: tuple[tuple[str, float | None], ...] = (
    ("none", None), ("example", 8.0), ("client", 8.0), ("example", 2.0), ("client", 2.0),
)  # fmt: skip


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
    tried = TRIED_THERE.get((data, clients, method, level), TRIED[method].get(level, ()))
    if level == "client":
        plain = best(data, clients, method, "none", scores)
        pairs = [(plain.rate, clip) for clip in tried] if plain else []
    else:
        pairs = [(rate, EXAMPLE_CLIP) for rate in tried]
    epsilon = None if level == "none" else 8.0
    return [Cell(data, clients, method, level, epsilon, rate, clip, TUNING_SEED) for rate, clip in pairs]


def best(data: str, clients: int, method: str, level: str, scores: Scores) -> Cell | None:
    """The candidate with the highest score, the first of equal ones; None until all have been tried."""
    tried = candidates(data, clients, method, level, scores)
    if len(tried) < 2:
        return tried[0] if tried else None
    return None if any(cell not in scores for cell in tried) else max(tried, key=lambda cell: scores[cell])


def cells(names: list[str], scores: Scores) -> Iterator[Cell]:
    """Every cell, tuning before what it decides; ``scores`` grows while they are taken."""
    groups = [(*group, method) for group in GROUPS if group[0] in names for method in METHODS]
    groups += [("sst2", 6, method) for method in TRIED if method not in METHODS and "sst2" in names]
    for group in groups:
        for level in TRIED[group[2]]:
            tried = candidates(*group, level, scores)
            yield from tried if len(tried) > 1 else []
            yield from decided(group, level, None if level == "none" else 8.0, scores)
    for group in groups:
        for level in ("example", "client"):
            yield from decided(group, level, 2.0, scores)


def decided(group: tuple[str, int, str], level: str, epsilon: float | None, scores: Scores) -> list[Cell]:
    """The test runs of what was found best."""
    found = best(*group, level, scores)
    return [replace(found, epsilon=epsilon, seed=seed) for seed in SEEDS] if found else []


def rows_of(name: str, folder: Path | None) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All training rows and all test rows, each with ``text`` and ``label``."""
    if name == "hpo":
        columns = [demo.rows(f"hpo-{part}") for part in ("train", "test")]
        made = [zip(part["text"], part["label"], strict=True) for part in columns]
    else:
        assert folder is not None
        files = [(folder / f"{part}.tsv").read_text("utf-8").splitlines()[1:] for part in ("train", "dev")]
        made = [(line.rsplit("\t", 1) for line in lines) for lines in files]
    train, test = ([{"text": text, "label": label} for text, label in part] for part in made)
    return spread(train), spread(test)


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
    own = METHODS[cell.method.partition(", omit ")[0]]
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
        "privacy": privacy(cell, min(cell.clients, MOST), work),
        "server": {"evaluate": "end"},
        "engine": {"name": "inprocess", "threads": 1},
        "output": {"dir": f"{work}/run"},
    }


def privacy(cell: Cell, clients: int, work: str) -> dict[str, Any]:
    if omitted := cell.method.partition(", omit ")[2]:
        if omitted != "unlisted_rows":
            return {"omit": [omitted]}
        Path(work, "words.txt").write_text("\n".join(public_words()), "utf-8")
        return {"omit": [omitted], "public_vocabulary": f"{work}/words.txt"}
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
    names = ["sst2", "hpo"] if folder else ["hpo"]
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


def table(scores: Scores) -> str:
    """A line for each data set, number of clients and method: mean ± sd over the seeds, and how many there are."""
    heads = ["no noise", *(f"{level}, {epsilon:g}" for level, epsilon in COLUMNS[1:])]
    made = [f"| data | clients | sent | {' | '.join(heads)} | rate; rate; clip |", f"|{'---|' * (len(heads) + 4)}"]
    for key in ((*group, method) for group in GROUPS for method in METHODS):
        each = [_score(list(by_seed(*key, *column, scores).values())) for column in COLUMNS]
        values = [_tuned(*key, level, scores) for level in ("none", "example", "client")]
        if set(each) != {"–"}:
            made.append(f"| {key[0]} | {key[1]} | {key[2]} | {' | '.join(each)} | {'; '.join(values)} |")
    return "\n".join(made)


def table_of_omissions(scores: Scores) -> str:
    """A line for each omission: its score, and what it loses, seed by seed."""
    made = ["| sst2, 6 clients | score | lost, seed by seed | rate |", "|---|---|---|---|"]
    plain = by_seed("sst2", 6, "FedAvg", "none", None, scores)
    for method in ("FedAvg", *(f"FedAvg, omit {part}" for part in OMISSIONS)):
        own = by_seed("sst2", 6, method, "none", None, scores)
        lost = [plain[seed] - own[seed] for seed in own if seed in plain] if method != "FedAvg" else []
        tuned = _tuned("sst2", 6, method, "none", scores)
        made.append(f"| {method} | {_score(list(own.values()))} | {_score(lost)} | {tuned} |")
    return "\n".join(made)


def by_seed(
    data: str, clients: int, method: str, level: str, epsilon: float | None, scores: Scores
) -> dict[int, float]:
    """Seed -> score on the test rows, with the settings that tuning chose; others were chosen from fewer."""
    tests = decided((data, clients, method), level, epsilon, scores)
    return {cell.seed: scores[cell] for cell in tests if cell in scores}


def _tuned(data: str, clients: int, method: str, level: str, scores: Scores) -> str:
    """What was chosen, with a star at an end of what was tried."""
    found, tried = best(data, clients, method, level, scores), candidates(data, clients, method, level, scores)
    if not found:
        return "–"
    star = "*" if len(tried) > 1 and found in (tried[0], tried[-1]) else ""
    return f"{found.clip if level == 'client' else found.rate:g}{star}"


def _score(scores: list[float]) -> str:
    if not scores:
        return "–"
    seeds = "" if len(scores) == len(SEEDS) else f" ({len(scores)} of {len(SEEDS)} seeds)"
    mean = round(statistics.fmean(scores), 3) + 0.0  # no -0.000
    return f"{mean:.3f}" + (f" ± {statistics.stdev(scores):.3f}" if scores[1:] else "") + seeds


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "table"):
        commands.add_parser(name).add_argument("--results", type=Path, default=RESULTS)
    measuring = commands.choices["measure"]
    measuring.add_argument("--sst2", type=Path, help="the folder with GLUE's train.tsv and dev.tsv")
    measuring.add_argument("--only", default="", help="parts of a cell's words, with commas")
    measuring.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    asked = parser.parse_args()
    if asked.command == "table":
        scores, page = read(asked.results), PAGE.read_text("utf-8")
        for name, text in ((NOISE, table(scores)), (OMITTED, table_of_omissions(scores))):
            page = fill(page, name, text)
        PAGE.write_text(page, "utf-8")
    else:
        measure(asked.sst2, asked.results, [word for word in asked.only.split(",") if word], asked.seconds)


if __name__ == "__main__":
    main()
