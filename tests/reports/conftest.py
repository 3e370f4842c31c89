"""Run folders written by hand, with figures that are easy to check."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

PARTS = {"embeddings": 9_000_000, **{f"layer.{i}": 2_000_000 for i in range(6)}, "head": 1_000_000}
PLACES: dict[str, dict[str, Any]] = {
    "embeddings": {"kind": "embeddings", "depth": None},
    **{f"layer.{i}": {"kind": "layer", "depth": i} for i in range(6)},
    "head": {"kind": "head", "depth": None},
}
JOB = """format = 3
stage = "{stage}"
[model]
name = "bert-base-uncased"
[task]
kind = "{task}"
[method]
name = "{method}"
rounds = {rounds}
"""


def lines(path: Path, items: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


def write_run(
    folder: Path,
    *,
    clients: Sequence[str] = ("client-0", "client-1"),
    rounds: int = 3,
    method: str = "fedbfpt",
    headline: str = "loss",
    labels: Sequence[str] = (),
    **result: Any,
) -> Path:
    """A run in which every client trains and sends one layer and the head: 3 MB up and down a round, 2 TFLOP."""
    folder.mkdir(parents=True)
    task = "classify" if labels else "mlm"
    job = JOB.format(stage=result.get("stage", ""), task=task, method=method, rounds=rounds)
    (folder / "job.toml").write_text(job, encoding="utf-8")
    parts = [{"name": name, **place, "bytes": PARTS[name]} for name, place in PLACES.items()]
    (folder / "parts.json").write_text(json.dumps(parts), encoding="utf-8")
    scores = [{headline: 3.0 - 0.5 * at, "other": 0.25} for at in range(-1, rounds)]
    work = [client_line(at, name, i) for at in range(rounds) for i, name in enumerate(clients)]
    scored = [
        {"round": at, "client": "server", "score": scores[at + 1], "seconds": 0.5} for at in range(-1, rounds)
    ]
    lines(folder / "rounds.jsonl", [*scored[:1], *work, *scored[1:]])
    ledger = [transfer(-1, name, "setup", "down", part) for name in clients for part in PARTS]
    for line in work:
        for direction in ("up", "down"):
            ledger += [transfer(line["round"], line["client"], "train", direction, part) for part in line["sent"]]
    lines(folder / "ledger.jsonl", ledger)
    held = {
        name: {"rows": 100, "examples": 120 + i, "labels": {x: 10 + j for j, x in enumerate(labels)} or None}
        for i, name in enumerate(clients)
    }
    (folder / "partition.json").write_text(
        json.dumps({"clients": held, "test": 40, "left_out": 2}), encoding="utf-8"
    )
    moved = 3_000_000 * rounds * len(clients)
    outcome = {
        "format": 3,
        "status": "finished",
        "message": None,
        "stage": "",
        "method": method,
        "task": task,
        "headline": headline,
        "score": scores[-1],
        "rounds": rounds,
        "bytes": {"up": moved, "down": moved, "setup": sum(PARTS.values()) * len(clients)},
        "flops": 2 * 10**12 * rounds * len(clients),
        "seconds": 75.5,
        "model": "model",
        "clients": {name: {"examples": 120 + i, "score": None} for i, name in enumerate(clients)},
    }
    (folder / "result.json").write_text(json.dumps({**outcome, **result}), encoding="utf-8")
    return folder


def client_line(at: int, client: str, number: int) -> dict[str, Any]:
    """What a client did: it built layers 0 and ``at`` and one above that depends on the client."""
    return {
        "round": at,
        "client": client,
        "examples": 120 + number,
        "steps": 4,
        "tokens": 3000,
        "loss": 3.0 - 0.3 * at + 0.1 * number,
        "flops": 2 * 10**12,
        "seconds": 1.25,
        "layers": sorted({0, at % 6, 4 + number % 2}),
        "trained": [f"layer.{at % 6}", "head"],
        "sent": [f"layer.{at % 6}", "head"],
    }


def transfer(at: int, client: str, phase: str, direction: str, part: str) -> dict[str, Any]:
    return {
        "round": at,
        "client": client,
        "phase": phase,
        "direction": direction,
        "part": part,
        "bytes": PARTS[part],
    }


def write_stages(folder: Path, *names: str, **options: Any) -> Path:
    """A job of several stages whose top result sums theirs."""
    for name in names:
        write_run(folder / "stages" / name, stage=name, **options)
    results = [json.loads((folder / "stages" / name / "result.json").read_text()) for name in names]
    total = {
        **results[-1],
        "stages": list(names),
        "bytes": {key: sum(r["bytes"][key] for r in results) for key in ("up", "down", "setup")},
        "flops": sum(r["flops"] for r in results),
        "seconds": sum(r["seconds"] for r in results),
    }
    (folder / "result.json").write_text(json.dumps(total), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder below the test's own folder."""
    return lambda name="try", **options: write_run(tmp_path / name, **options)


@pytest.fixture
def staged(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder with stages below the test's own folder."""
    return lambda *names, **options: write_stages(tmp_path / "two", *names, **options)
