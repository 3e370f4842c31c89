"""Robust aggregates under attack: the score with and without each defence. The table of docs/results/robust.md.

Ten clients with rows of made-up text train a BERT of two layers from scratch; one or two are bad. What they send
passes the checks that a site's reply passes, so that NaN and 1e30 are refused before any aggregate: these two are
tried with the mean alone.

    python benchmarks/robust.py            runs what is not yet in runs/robust/results.jsonl, then prints the table
    python benchmarks/robust.py --seconds 400    stops before the next run after so many seconds
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import fedstrata
from fedstrata.engines.local import LocalEngine
from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.runs import train
from fedstrata.server.server import Server
from fedstrata.sites.reply_checks import check_reply
from fedstrata.wire.codec import WireError

CLIENTS, CLASSES, ROWS, TEST_ROWS, SEEDS, ROUNDS = 10, 4, 48, 400, (0, 1, 2), 4
ATTACKS = ("none", "x1000", "sign flip", "label flip", "stale", "x1e30", "NaN")
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, max_norm": {"max_norm": 2.0},
    "median": {"aggregate": "median"},
    "trimmed_mean": {"aggregate": "trimmed_mean", "malicious": 2},
    "krum": {"aggregate": "krum", "malicious": 2},
    "multi_krum": {"aggregate": "multi_krum", "malicious": 2},
    "centered_clip": {"aggregate": "centered_clip"},
}
FOLDER = Path("runs/robust")


# What a bad client sends: from its honest tensors, what it had received, and what it sent first


def times(factor: float) -> Callable[[Tensors, Tensors], Tensors]:
    """The change, so many times."""
    return lambda new, old: {name: old[name] + factor * (new[name] - old[name]) for name in new}


SENT: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "x1000": times(1000.0),
    "x1e30": lambda new, old: {name: tensor * 1e30 for name, tensor in new.items()},
    "sign flip": times(-5.0),
    "NaN": lambda new, old: {name: tensor * float("nan") for name, tensor in new.items()},
}


@dataclass
class Bad:
    """Who is bad in the run that is on, and how."""

    clients: tuple[str, ...] = ()
    attack: str = "none"
    server: Server | None = None
    first: dict[str, Any] = field(default_factory=dict)


BAD = Bad()


class AttackedEngine(LocalEngine):
    """The engine in one process, whose bad clients send something else."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:  # type: ignore[override]
        """What comes back; what a server of sites would refuse counts as no reply."""
        asked: list[Request] = []

        def seen() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield request

        for reply in super().exchange(seen()):
            request = asked[-1]
            changed = reply
            if request.phase == "train" and reply.client in BAD.clients:
                changed = replace(reply, weights=self.attacked(reply))
            assert BAD.server is not None
            try:
                check_reply(BAD.server, request, changed, None)
            except WireError as error:
                yield NoReply(reply.client, str(error))
            else:
                yield changed

    def attacked(self, reply: Reply) -> dict[str, Tensors]:
        """What a bad client sends."""
        if BAD.attack == "stale":
            return BAD.first.setdefault(reply.client, reply.weights)  # type: ignore[no-any-return]
        if BAD.attack not in SENT:
            return reply.weights
        return {part: SENT[BAD.attack](own, self.shared[part][1]) for part, own in reply.weights.items()}


def text(rng: random.Random, label: int) -> str:
    """A made-up sentence: of ten words five are of its class, two of any class, three of none."""
    own = [f"w{label}{chr(97 + rng.randrange(12))}" for _ in range(5)]
    other = [f"w{rng.randrange(CLASSES)}{chr(97 + rng.randrange(12))}" for _ in range(2)]
    words = own + other + [f"the{chr(97 + rng.randrange(20))}" for _ in range(3)]
    rng.shuffle(words)
    return " ".join(words)


def write_rows(path: Path, count: int, seed: str, flipped: bool = False) -> str:
    """A file of rows; of a bad client with every label the next one."""
    rng = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for i in range(count):
            shown = (i + flipped) % CLASSES
            rows.writerow([text(rng, i % CLASSES), f"class {shown}"])
    return str(path)


def job(seed: int, defence: str, bad: int, attack: str, model: dict[str, Any]) -> dict[str, Any]:
    """A job of ten clients, the last ``bad`` of which are bad."""
    data = FOLDER / f"rows-{seed}-{bad if attack == 'label flip' else 0}"
    data.mkdir(parents=True, exist_ok=True)
    names = [f"c{i}" for i in range(CLIENTS)]
    flipped = names[CLIENTS - bad :] if attack == "label flip" else []
    train_rows = {
        name: write_rows(data / f"{name}.csv", ROWS, f"{seed} {name}", name in flipped) for name in names
    }
    return {
        "model": model,
        "task": {"kind": "classify", "labels": [f"class {i}" for i in range(CLASSES)]},
        "data": {"train": train_rows, "test": write_rows(data / "test.csv", TEST_ROWS, f"{seed} test")},
        "method": {"name": "fedavg", "rounds": ROUNDS},
        "head": {"kind": "mean"},
        "train": {
            "dropout": False,
            "batch_size": 16,
            "max_tokens": 24,
            "learning_rate": 5e-3,
            "seed": seed,
            "device": "cpu",
        },
        "server": {**DEFENCES[defence], "evaluate": "end"},
        "engine": {"name": "inprocess", "threads": 1},
        "output": {"dir": str(FOLDER / "run")},
    }


def new_model() -> dict[str, Any]:
    """A BERT of two layers of width 32, made by a run of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return {"config": {"model_type": "bert", "vocab_size": 300, "max_position_embeddings": 32, **sizes}}


def start_model(seed: int) -> dict[str, Any]:
    """The model that all runs of a seed start from."""
    target = FOLDER / f"start-{seed}"
    if not target.exists():
        fresh = job(seed, "mean", 0, "none", new_model())
        run = fedstrata.run({**fresh, "method": {"name": "fedavg", "rounds": 1}})
        shutil.copytree(run.folder / "start", target)
        shutil.rmtree(run.folder)
    return {"name": str(target)}


def accuracy(seed: int, defence: str, bad: int, attack: str) -> float | None:
    """The score after the last round; None where the run stops with a sentence."""
    global BAD
    BAD = Bad(tuple(f"c{i}" for i in range(CLIENTS - bad, CLIENTS)), attack)
    shutil.rmtree(FOLDER / "run", ignore_errors=True)
    try:
        return fedstrata.run(job(seed, defence, bad, attack, start_model(seed))).score["accuracy"]
    except UserError:
        return None


def patched() -> None:
    """Runs of this program have the engine above, which has to know the server."""
    make_server = train._make_server

    def kept(stage: Any) -> Server:
        BAD.server = make_server(stage)
        return BAD.server

    train._make_server = kept
    train.LocalEngine = AttackedEngine  # type: ignore[misc,attr-defined]


def cells() -> Iterator[tuple[int, str, int, str]]:
    """Seed, defence, bad clients, attack."""
    for attack, bad, defence, seed in itertools.product(ATTACKS, (0, 1, 2), DEFENCES, SEEDS):
        refused = attack in ("x1e30", "NaN") and defence != "mean"
        if (attack == "none") == (bad == 0) and not refused:
            yield seed, defence, bad, attack


def table(results: dict[str, float | None]) -> str:
    """The table: mean and standard deviation over the seeds; how many of them stopped."""
    lines = ["| attack | bad | " + " | ".join(DEFENCES) + " |", "|---|---|" + "---|" * len(DEFENCES)]
    for attack, bad in ((attack, bad) for attack in ATTACKS for bad in (0, 1, 2)):
        if (attack == "none") != (bad == 0):
            continue
        row = []
        for defence in DEFENCES:
            keys = [key_of(seed, defence, bad, attack) for seed in SEEDS]
            found = [results[key] for key in keys if key in results]
            scores = [100 * value for value in found if value is not None]
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            stopped = f"{len(found) - len(scores)} stopped" if len(scores) < len(found) else ""
            row.append((f"{statistics.mean(scores):.1f}{spread} " if scores else "") + stopped)
        lines.append(f"| {attack} | {bad} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def key_of(*cell: Any) -> str:
    """A cell's name."""
    return json.dumps(cell)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    until = time.monotonic() + parser.parse_args().seconds
    torch.set_num_threads(1)
    patched()
    path = FOLDER / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = dict(map(json.loads, path.read_text("utf-8").splitlines())) if path.exists() else {}
    for cell in cells():
        if key_of(*cell) not in results and time.monotonic() < until:
            results[key_of(*cell)] = accuracy(*cell)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key_of(*cell), results[key_of(*cell)]]) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
