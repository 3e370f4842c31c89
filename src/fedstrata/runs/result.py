"""What a run came to: ``result.json``, always made from the records on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.cost.ledger import totals
from fedstrata.cost.target import reached
from fedstrata.job.tables import Job, method_name
from fedstrata.plan.kinds import FORMAT
from fedstrata.plan.streams import SERVER
from fedstrata.wire.files import read_lines, replace_folder, write_bytes


@dataclass(frozen=True)
class Result:
    """What a run came to; the same fields as its ``result.json``.

    Attributes:
        folder: the output folder.
        status: ``finished``, ``stopped`` or ``failed``.
        score: metric -> value, of the last stage.
        bytes: payload ``up`` and ``down`` over all rounds and clients; the start model apart, as ``setup``.
        flops: of all training steps, at the clients and at the server.
        seconds: clock time.
        model: folder of the final model.
        clients: client -> its ``examples``, and its own ``score`` where it keeps parts.
        target: of a job with ``output.target``: that ``score``, and the ``rounds`` and ``bytes`` of the last stage
            until it was first reached, None where it never was.
        stages: the stages' results, in order; empty for a job of one stage.
    """

    folder: Path
    status: str
    score: dict[str, float]
    bytes: dict[str, int]
    flops: int
    seconds: float
    model: Path
    clients: dict[str, Any]
    target: dict[str, Any] | None = None
    stages: tuple[Result, ...] = field(default=())

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every transfer of the run, stage by stage, as :class:`fedstrata.cost.ledger.Entry` describes it."""
        if self.stages:
            return [{"stage": stage.folder.name, **line} for stage in self.stages for line in stage.ledger]
        return read_lines(self.folder / "ledger.jsonl")


def write_result(job: Job, folder: Path, status: str, message: str | None) -> None:
    """Sum up a stage from its records."""
    rounds = read_lines(folder / "rounds.jsonl")
    first = min(0, job.method.rounds - 1)  # without any round the start model's score is the result
    scored = [record for record in rounds if record["client"] == SERVER and record["round"] >= first]
    trained = [record for record in rounds if record["client"] != SERVER]
    last = scored[-1] if scored else {}
    clients = _clients(folder / "partition.json")
    scores = last.get("clients", {})
    ledger = read_lines(folder / "ledger.jsonl")
    wanted = job.output.target
    met = None if wanted is None else reached(wanted, job.task.headline, rounds, ledger)
    target = {"score": wanted, "rounds": met and met.rounds, "bytes": met and met.bytes}
    result = {
        "format": FORMAT,
        "status": status,
        "message": message,
        "stage": job.stage,
        "method": method_name(job.method),
        "task": job.task.kind,
        "headline": job.task.headline,
        "score": last.get("score", {}),
        "rounds": job.method.rounds,
        "bytes": totals(ledger),
        "flops": sum(record["flops"] + record.get("server_flops", 0) for record in trained),
        "seconds": sum(record["seconds"] for record in rounds),
        "model": "model",
        "target": None if wanted is None else target,
        "missing": read_lines(folder / "missing.jsonl"),
        "clients": {
            client: {"examples": clients.get(client, {}).get("examples", 0), "score": scores.get(client)}
            for client in dict.fromkeys([*clients, *scores])
        },
    }
    _write(folder, result)


def combine_stages(stages: Sequence[Result], folder: Path) -> Result:
    """The result of a job of several stages: the last one's score and model, the sums of all costs."""
    last = json.loads((stages[-1].folder / "result.json").read_text(encoding="utf-8"))
    kinds = ("up", "down", "setup")
    result = {
        **last,
        "stages": [stage.folder.name for stage in stages],
        "bytes": {kind: sum(stage.bytes[kind] for stage in stages) for kind in kinds},
        "flops": sum(stage.flops for stage in stages),
        "seconds": sum(stage.seconds for stage in stages),
    }
    partial = folder / ".model.part"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(stages[-1].model, partial, copy_function=link)
    replace_folder(partial, folder / "model")
    _write(folder, result)
    return read_result(folder)


def read_result(folder: Path) -> Result:
    """The result in an output folder."""
    data = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return Result(
        folder=folder,
        **{name: data[name] for name in ("status", "score", "bytes", "flops", "seconds", "clients")},
        model=folder / data["model"],
        target=data.get("target"),
        stages=tuple(read_result(folder / "stages" / name) for name in data.get("stages", ())),
    )


def read_status(folder: Path) -> str | None:
    """The status in an output folder, None where there is no result yet, or none that can be read."""
    try:
        return str(json.loads((folder / "result.json").read_text(encoding="utf-8"))["status"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _clients(partition: Path) -> dict[str, Any]:
    """What each client has; nothing where the run that is to write the file has not come so far."""
    try:
        return dict(json.loads(partition.read_text(encoding="utf-8"))["clients"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _write(folder: Path, result: dict[str, Any]) -> None:
    write_bytes(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False).encode())


def link(source: str, target: str) -> None:
    """A second name for the same file where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
