"""How a stage's ``result.json`` is summed up from the records on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.cost.ledger import totals
from fedstrata.cost.target import reached
from fedstrata.job.tables import Job, method_name
from fedstrata.plan.kinds import FORMAT
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.runs.environment import environments
from fedstrata.runs.result import write_summary
from fedstrata.wire.files import read_lines


def write_result(job: Job, folder: Path, status: str, message: str | None) -> None:
    """Sum up a stage from its records."""
    rounds = read_lines(folder / "rounds.jsonl")
    first = min(0, job.method.rounds - 1)  # without any round the start model's score is the result
    scored = [record for record in rounds if record["client"] == SERVER and record["round"] >= first]
    trained = [record for record in rounds if record["client"] != SERVER]
    last = scored[-1] if scored else {}
    partition = read_partition(folder / "partition.json")
    ledger, missing = read_lines(folder / "ledger.jsonl"), read_lines(folder / "missing.jsonl")
    clients = partition.get("clients", {})
    examples = {client: record["examples"] for client, record in clients.items()}
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
        "environment": environments(folder),
        "missing": missing,
        "lost": read_lines(folder / "lost.jsonl"),
        "outliers": read_lines(folder / "outliers.jsonl"),
        "privacy": _privacy(job, folder, status, examples, (trained, missing, ledger)),
        "clients": _clients(folder, clients, last.get("clients", {})),
    }
    write_summary(folder, result)


def _privacy(
    job: Job,
    folder: Path,
    status: str,
    examples: Mapping[str, int],
    records: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Any] | None:
    """What the clients have spent, by the records of who trained, of who is missing and of what was communicated.

    Of a run that was stopped or has failed the round that had begun counts for all whom it asks: any of them may
    have answered.
    """
    from fedstrata.runs.privacy import participated, privacy_record  # needs torch
    from fedstrata.server.state import newest_commit

    if job.privacy.level == "none":
        return None
    trained, missing, ledger = records
    commit, asked = newest_commit(folder), list[str]()
    round = int(commit["done"]) if commit else 0
    begun = {max(0, line["round"]) for line in ledger}  # the start model goes out with the first round's request
    begun |= {line["round"] for line in read_lines(folder / "transport.jsonl")}
    if status != "finished" and round in begun and round < job.method.rounds:
        asked = sample_clients(list(examples), job.clients.fraction, round, Streams(job.train.seed))
    rounds = participated(job, trained, missing, [(client, round) for client in asked])
    # a site may have come after the file with all examples was written, and be away since the server was killed
    said = {line["client"]: line["examples"] for line in trained}
    return privacy_record(job, {client: n or said.get(client, 0) for client, n in examples.items()}, rounds)


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


def read_partition(path: Path) -> dict[str, Any]:
    """Who has what; nothing where the run that is to write the file has not come so far."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return {}
