"""Run folders, read back: finished, failed, killed at any moment, or going on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedstrata.errors import UserError
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import FORMAT, LOCK
from fedstrata.plan.streams import SERVER
from fedstrata.reports.partial_results import SETUP, result_of_records, result_of_stages
from fedstrata.reports.parts import PartRecord
from fedstrata.reports.record_files import record_lines, record_object, record_parts, stages_on_disk
from fedstrata.reports.record_types import CLASSES, LEDGER, PARTITION, RESULT, ROUNDS, check_whole
from fedstrata.wire.files import endless_file, locked
from fedstrata.wire.foreign import visible

FILES = ("result.json", "job.toml", "partition.json", "rounds.jsonl", "ledger.jsonl", "stages")
"""What a run folder may hold; at least one of them makes it one."""


@dataclass(frozen=True)
class Run:
    """A run folder, or a stage of one.

    Attributes:
        name: the folder's name.
        result: ``result.json``; of a run that wrote none, the same keys from what it had recorded.
        job: the resolved job, table by table.
        partition: how many rows, examples and labels each client had.
        parts: the model's parts by name, in the model's order.
        rounds: one line per round and client, and one per scored round with client ``server``.
        ledger: one line per transfer, in bytes.
        stages: the stages of a job that has several; they have the rounds, ledger, partition and parts.
        classes: confusion matrix and figures of each class; empty where there are none.
    """

    name: str
    result: dict[str, Any]
    job: dict[str, Any]
    partition: dict[str, Any]
    parts: Mapping[str, PartRecord]
    rounds: tuple[dict[str, Any], ...]
    ledger: tuple[dict[str, Any], ...]
    stages: tuple[Run, ...] = ()
    classes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stage_runs(self) -> tuple[Run, ...]:
        """The stages, or the run itself where it has only one."""
        return self.stages or (self,)

    @property
    def clients(self) -> list[str]:
        """The clients' names: those of the result, else those of the partition."""
        return list(self.result["clients"] or self.partition.get("clients", {}))

    @property
    def holders(self) -> list[str]:
        """Those that have rows to train on: of the others only the test rows are used."""
        return list(self.stage_runs[-1].partition.get("clients") or self.clients)

    @cached_property
    def work(self) -> list[dict[str, Any]]:
        """The lines of ``rounds`` that are clients'."""
        return [line for line in self.rounds if line["client"] != SERVER]

    @cached_property
    def transfers(self) -> list[dict[str, Any]]:
        """The lines of ``ledger`` after setup."""
        return [line for line in self.ledger if line["phase"] != SETUP]

    @cached_property
    def bytes_by_round(self) -> Counter[int]:
        """Bytes of ``transfers``, up and down, of all clients together."""
        total = Counter[int]()
        for (_, _, at), size in self.traffic.items():
            total[at] += size
        return total

    @cached_property
    def bytes_by_client(self) -> Counter[tuple[str, str]]:
        """Bytes of ``transfers`` by client and direction."""
        return _bytes_by(self.transfers, "client", "direction")

    @cached_property
    def traffic(self) -> Counter[tuple[str, str, int]]:
        """Bytes of ``transfers`` by direction, part and round (-1: scoring the start model), of all clients."""
        return _bytes_by(self.transfers, "direction", "part", "round")

    @cached_property
    def flops_by_round(self) -> Counter[int]:
        """FLOPs of ``work``, the server's half included."""
        total = Counter[int]()
        for line in self.work:
            total[line["round"]] += line["flops"] + line.get("server_flops", 0)
        return total

    @cached_property
    def named_parts(self) -> list[str]:
        """The parts that are named anywhere, in the model's order; what else was communicated comes last."""
        names = {line["part"] for line in self.ledger}
        for line in self.work:
            names.update(line.get("trained", ()), line.get("sent", ()))
        depths = {depth for line in self.work for depth in line.get("layers", ())}
        names.update(part.name for part in self.parts.values() if part.depth in depths)
        return [name for name in self.parts if name in names] + sorted(names - set(self.parts))

    @cached_property
    def model_parts(self) -> list[str]:
        """The parts of the model alone, of ``named_parts``."""
        return [name for name in self.named_parts if name in self.parts]


class Point(NamedTuple):
    """The headline score after ``round`` and what all clients together had spent by then."""

    round: int
    score: float
    bytes: int
    flops: int


def load_run(folder: Path) -> Run:
    """Read a run folder; of a run that was killed, what it had written.

    Raises:
        UserError: the folder is no run folder, another version wrote it, or one of its files cannot be read.
    """
    if (folder / "cells").is_dir():
        raise UserError(f"{folder}: is a sweep's folder without its table; the sweep writes it when it ends")
    if not any((folder / name).exists() for name in FILES):
        raise UserError(f"{folder}: is not a run folder; it holds none of {', '.join(FILES)}")
    result = record_object(folder / "result.json", RESULT)
    job = read_toml(folder / "job.toml") if (folder / "job.toml").exists() else {}
    check_format(folder, result or job or {"format": FORMAT})
    names = result.get("stages") or stages_on_disk(folder)
    stages = tuple(load_run(folder / "stages" / n) for n in names if (folder / "stages" / n).is_dir())
    rounds = record_lines(folder / "rounds.jsonl", ROUNDS)
    ledger = record_lines(folder / "ledger.jsonl", LEDGER)
    results = [stage.result for stage in stages]
    recorded = result_of_stages(results) if stages else result_of_records(job, rounds, ledger)
    if not stages and result.get("status") == "finished":
        check_whole(folder, result, recorded)
    whole = {**recorded, **result}
    more = job.get("method", {}).get("rounds", 0) > whole.get("rounds", 0) or any(
        stage.result["status"] == "running" for stage in stages
    )
    if (more or whole["status"] != "finished") and _goes_on(folder):  # result.json is an earlier call's
        whole = {**result, **recorded, "status": "running", "message": None}
    elif recorded["flops"] > whole["flops"]:  # so it is, and the call after it was killed
        whole = {**result, **recorded}
    return Run(
        name=visible(folder.resolve().name),
        result=whole,
        job=job,
        partition=record_object(folder / "partition.json", PARTITION),
        parts=record_parts(folder / "parts.json"),
        rounds=rounds,
        ledger=ledger,
        stages=stages,
        classes=record_object(folder / "classes.json", CLASSES),
    )


def check_format(folder: Path, content: Mapping[str, Any]) -> None:
    """Refuse files that another version of FedStrata wrote.

    Raises:
        UserError: the content of one of them has no format or another one.
    """
    found = content.get("format", 1)
    if found != FORMAT:
        age = "a newer" if isinstance(found, int) and found > FORMAT else "an older"
        raise UserError(f"{folder}: was written by {age} version of FedStrata and cannot be read by this one")


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several run folders; equal folder names are told apart by the folders above them.

    Raises:
        UserError: as :func:`load_run`.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: is no folder; expected the output folder of a run")
        if path := endless_file(folder):
            raise UserError(f"{path}: is a pipe or a device; expected a file in a run's folder")
    paths = [tuple(map(visible, folder.resolve().parts)) for folder in folders]
    deep = max(map(len, paths), default=1)
    tails = (["/".join(path[-n:]) for path in paths] for n in range(1, deep + 1))
    names = next(tail for tail in tails if len(set(tail)) == len(set(paths)))
    return [replace(load_run(folder), name=name) for folder, name in zip(folders, names, strict=True)]


def upto(run: Run, stage: str) -> Run | None:
    """A stage together with those that its model comes from, as one run; None where there is no such stage."""
    stages = {stage_run.result["stage"]: stage_run for stage_run in run.stage_runs}
    chain: list[Run] = []
    while stage in stages:
        chain.insert(0, stages.pop(stage))
        stage = chain[0].job.get("start", "")
    if len(chain) < 2:
        return chain[0] if chain else None
    result = result_of_stages([stage.result for stage in chain])
    return replace(run, stages=tuple(chain), result={**result, "status": chain[-1].result["status"]})


def headline(run: Run, score: dict[str, float] | None) -> float | None:
    """The run's headline metric among measured ones, None where it is not."""
    return (score or {}).get(run.result["headline"])


def score(run: Run) -> tuple[float | None, float | None]:
    """The run's headline score, and its standard deviation where it is a mean over clients' own scores."""
    value = headline(run, run.result["score"])
    own = [headline(run, client.get("score")) for client in run.result["clients"].values()]
    known = [own_score for own_score in own if own_score is not None]
    if not known:
        return value, None
    return fmean(known) if value is None else value, stdev(known) if len(known) > 1 else None


def curve(run: Run) -> list[Point]:
    """The scored rounds of a run, round -1 (the start model) included, in order.

    Of a run with stages, those of the last stage; what the earlier stages cost is counted in. Of a run that scored
    its clients' own models only, one point, its end.
    """
    *earlier, last = run.stage_runs
    spent = sum(stage.result["bytes"]["up"] + stage.result["bytes"]["down"] for stage in earlier)
    worked = sum(stage.result["flops"] for stage in earlier)
    scores = {line["round"]: headline(last, line["score"]) for line in last.rounds if line["client"] == SERVER}
    if all(value is None for value in scores.values()):
        scores = {last.result["rounds"] - 1: score(last)[0]}
    rounds = sorted({*scores, *last.bytes_by_round, *last.flops_by_round})
    moved, done = (
        dict(zip(rounds, accumulate(own[at] for at in rounds), strict=True))
        for own in (last.bytes_by_round, last.flops_by_round)
    )
    return [
        Point(at, value, spent + moved[at], worked + done[at])
        for at, value in sorted(scores.items())
        if value is not None and math.isfinite(value)
    ]


def _bytes_by(transfers: Iterable[dict[str, Any]], *keys: str) -> Counter[Any]:
    total, place = Counter[Any](), itemgetter(*keys)
    for line in transfers:
        total[place(line)] += line["bytes"]
    return total


def _goes_on(folder: Path) -> bool:
    """Whether a process is at the run of a folder; that of a stage's is at the run that it belongs to."""
    folder = folder.resolve()
    return locked(folder / LOCK) or (folder.parent.name == "stages" and locked(folder.parent.parent / LOCK))
