"""What a run came to: ``result.json``, always made from the records on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.cost.ledger import totals
from fedstrata.cost.target import reached
from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name
from fedstrata.models.folders import FILES
from fedstrata.plan.kinds import FORMAT
from fedstrata.plan.streams import SERVER
from fedstrata.wire.files import clear, link, read_lines, replace_folder, write_bytes

KEYS = ("status", "score", "bytes", "flops", "seconds", "clients", "model", "shared", "scored")
"""What every ``result.json`` has."""


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
        model: folder of the final model; None where each client has its own.
        shared: folder of the parts that all clients have in common where each has its own model; else None.
        adapter: folder of the final model's adapters, for peft; None without adapters, or where each client has
            its own, in ``clients/NAME/adapter``.
        scored: which folder or folders the score belongs to, as a phrase; None of a run that is not finished.
        clients: client -> its ``rows`` and ``examples``, and where it keeps parts its own ``score`` and the folder
            of its own ``model``, below ``folder``.
        baseline: ``what`` is always predicted, and its ``score``, metric -> value; None for a task without labels.
        data: what is known of the rows (:func:`fedstrata.data.facts.row_facts`), and what tokenization does to
            them (:func:`fedstrata.client.facts.token_facts`).
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
    model: Path | None
    shared: Path | None
    scored: str | None
    clients: dict[str, Any]
    target: dict[str, Any] | None = None
    baseline: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    stages: tuple[Result, ...] = field(default=())
    adapter: Path | None = None

    @property
    def start(self) -> Path:
        """The folder that a later stage starts from."""
        found = self.model or self.shared
        assert found is not None
        return found

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
    partition = _partition(folder / "partition.json")
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
        "baseline": partition.get("baseline"),
        "data": partition.get("data"),
        "rounds": job.method.rounds,
        "bytes": totals(ledger),
        "flops": sum(record["flops"] + record.get("server_flops", 0) for record in trained),
        "seconds": _seconds(folder, rounds),
        **_models(job, folder, status),
        "target": None if wanted is None else target,
        "missing": read_lines(folder / "missing.jsonl"),
        "outliers": read_lines(folder / "outliers.jsonl"),
        "clients": _clients(folder, partition.get("clients", {}), last.get("clients", {})),
    }
    _write(folder, result)


def _seconds(folder: Path, rounds: Iterable[Mapping[str, Any]]) -> float:
    """Clock time of the rounds; not the sum of the clients' own, which may work side by side."""
    from fedstrata.server.state import newest_commit  # needs torch, which results that are only read do not

    commit = newest_commit(folder)
    if commit and commit["done"]:
        return float(commit["seconds"])
    return float(sum(record["seconds"] for record in rounds))


def _clients(folder: Path, partition: Mapping[str, Any], scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each client has: rows and examples, and of its own a score and a model."""
    return {
        client: {
            "rows": partition.get(client, {}).get("rows", 0),
            "examples": partition.get(client, {}).get("examples", 0),
            "score": scores.get(client),
            "model": _folder(folder, f"clients/{client}/model"),
        }
        for client in dict.fromkeys([*partition, *scores])
    }


def _models(job: Job, folder: Path, status: str) -> dict[str, str | None]:
    """The folders of the models, and which of them the score belongs to."""
    model, shared, adapter = (_folder(folder, name) for name in ("model", "shared", "adapter"))
    if status != "finished" or not (model or shared or adapter):
        scored = None
    elif model:
        scored = "model"
    elif adapter and not shared:
        scored = "adapter"
    elif job.between_sites:
        run = (folder / "state" / "run").read_text(encoding="utf-8")
        scored = f"each site's own model, on its own disk: state/models/{run}"
    elif any((folder / "clients").glob("*/adapter")) and not job.adapter.merged_model:
        scored = "clients/NAME/adapter of each client; the score is the mean over them"
    elif any((folder / "clients").glob("*/model")):
        scored = "clients/NAME/model of each client; the score is the mean over them"
    else:
        scored = "the models of the clients, not saved; --resume with output.client_models=true saves them"
    return {"model": model, "shared": shared, "adapter": adapter, "scored": scored}


def _folder(folder: Path, name: str) -> str | None:
    return name if (folder / name).exists() else None


def combine_stages(stages: Sequence[Result], folder: Path) -> Result:
    """The result of a job of several stages: the last one's score and model, the sums of all costs."""
    last = _read(stages[-1].folder)
    kinds = ("up", "down", "setup")
    result = {
        **last,
        "stages": [stage.folder.name for stage in stages],
        "bytes": {kind: sum(stage.bytes[kind] for stage in stages) for kind in kinds},
        "flops": sum(stage.flops for stage in stages),
        "seconds": sum(stage.seconds for stage in stages),
    }
    for name in ("model", "shared", "clients", "adapter", "base"):
        if (stages[-1].folder / name).exists():
            partial = folder / f".{name}.part"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(stages[-1].folder / name, partial, copy_function=link)
            replace_folder(partial, folder / name, FILES)
        else:
            clear(folder / name, FILES)
    _write(folder, result)
    return read_result(folder)


def read_result(folder: Path) -> Result:
    """The result in an output folder."""
    data = _read(folder)
    return Result(
        folder=folder,
        **{name: data[name] for name in KEYS[:-3]},
        model=data["model"] and folder / data["model"],
        shared=data["shared"] and folder / data["shared"],
        scored=data["scored"],
        adapter=folder / data["adapter"] if data.get("adapter") else None,
        target=data.get("target"),
        baseline=data.get("baseline"),
        data=data.get("data"),
        stages=tuple(read_result(folder / "stages" / name) for name in data.get("stages", ())),
    )


def read_status(folder: Path) -> str | None:
    """The status in an output folder, None where there is no result yet, or none that can be read."""
    try:
        return str(json.loads((folder / "result.json").read_text(encoding="utf-8"))["status"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _read(folder: Path) -> dict[str, Any]:
    """What ``result.json`` holds.

    Raises:
        UserError: it cannot be read, or is no run's result.
    """
    path = folder / "result.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or not data.keys() >= set(KEYS):
        raise UserError(f"{path}: is damaged; --resume makes it again from the run's records")
    return data


def _partition(path: Path) -> dict[str, Any]:
    """Who has what; nothing where the run that is to write the file has not come so far."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _write(folder: Path, result: dict[str, Any]) -> None:
    write_bytes(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False).encode())
