"""What a run that goes on must share with the one that began: its job, but for a few keys, and its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from fedstrata.data.fingerprint import Fingerprints, difference
from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import FORMAT
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import Streams
from fedstrata.runs.folder import check_format
from fedstrata.server.optimizer import LEARNING_RATES
from fedstrata.server.state import MANIFESTS
from fedstrata.wire.files import read_sealed, write_bytes, write_sealed

NONE: Mapping[str, str] = MappingProxyType({})
ORDER = ("stage", "start", "method", "model", "task", "data", "clients", "train", "head", "server", "wire")
"""Of several tables that differ, the first of these is named; of its keys the first of :data:`FIRST`."""
FIRST = ("name", "config", "kind", "train", "test")
FREE = {
    "engine": ("workers", "address", "deadline", "quorum", "federation", "insecure", "arrivals"),
    "output": ("dir", "target", "keep_state", "predictions"),
    "track": ("to", "project"),
}
"""Keys that no number of a run depends on."""
RATES = ("train.learning_rate", "server.learning_rate")


@dataclass(frozen=True)
class Change:
    """A key that a resumed job sets otherwise; None stands for a key that is not set."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        was, now = ("nothing" if value is None else repr(value) for value in (self.was, self.now))
        return f"its run began with {self.key} = {was}, the job now says {now}"


def same_job(job: Job, folder: Path, components: Mapping[str, str] = NONE) -> list[Change]:
    """Write the resolved job; or compare it with the one that this folder's run began with.

    Args:
        job: the job.
        folder: the stage's output folder.
        components: identities of the caller's own objects.

    Returns:
        What differs and may: learning rates that are lower, ``output.client_models``, more rounds.

    Raises:
        UserError: they differ in another key that a result depends on, the folder was written in another format,
            or its ``job.toml`` is damaged.
    """
    path = folder / "job.toml"
    if not path.exists():
        if any((folder / "state").glob(MANIFESTS)):
            raise job_missing(path)
        write_bytes(path, tomli_w.dumps(_tables(job, components)).encode())
    return changes(job, folder, components)


def job_missing(path: Path) -> UserError:
    """What is said of a run without its ``job.toml``."""
    return UserError(f"{path}: is missing, so that it cannot be told which job's run this is")


def as_recorded(job: Job, folder: Path) -> Job:
    """A job whose device and precision are "auto" with those that this folder's run began with.

    A GPU is not taken over: where there is none, the refusal says so.
    """
    left = {key for key in ("device", "precision") if getattr(job.train, key) == "auto"}
    path = folder / "job.toml"
    if not left or not path.exists():
        return job
    recorded = read_toml(path).get("train", {})
    own = {key: recorded[key] for key in left & recorded.keys() if recorded[key] != "cuda"}
    return job.model_copy(update={"train": job.train.model_copy(update=own)})


def changes(job: Job, folder: Path, components: Mapping[str, str] = NONE) -> list[Change]:
    """See :func:`same_job`; nothing is written, and a folder without a ``job.toml`` differs in nothing.

    Raises:
        UserError: the run cannot go on with a key that differs, or as :func:`differences`.
    """
    found = differences(job, folder, components)
    for change in found:
        if why := _refusal(change, job):
            raise UserError(f"{folder}: {change}; {why}")
    return found


def differences(job: Job, folder: Path, components: Mapping[str, str] = NONE) -> list[Change]:
    """What a job sets otherwise than the one that this folder's run began with, but for :data:`FREE`.

    The most telling comes first. A folder without a ``job.toml`` differs in nothing.

    Args:
        job: the job, resolved.
        folder: the stage's output folder.
        components: identities of the caller's own objects.

    Raises:
        UserError: the folder was written in another format, or its ``job.toml`` is damaged.
    """
    path = folder / "job.toml"
    if not path.exists():
        return []
    before = read_toml(path)
    check_format(folder, before.pop("format", None))
    before.pop("changes", None)
    now = _tables(job, components)
    del now["format"]
    _same_place(before.setdefault("engine", {}), now["engine"])
    return _differences(before, now)


def record_changes(job: Job, folder: Path, found: list[Change], done: int, components: Mapping[str, str]) -> None:
    """Write into ``job.toml``, as ``changes``, what differs from here on, with the 0-based round it holds from."""
    path = folder / "job.toml"
    old = read_toml(path).get("changes", [])
    new = [{**change, "round": min(change["round"], done)} for change in old]
    new += [{"round": done, "key": each.key, "was": each.was, "now": each.now} for each in found]
    if new != old:
        table = {**_tables(job, components), "changes": [without_none(change) for change in new]}
        write_bytes(path, tomli_w.dumps(table).encode())


def without_effect(job: Job, folder: Path) -> str:
    """What the job now asks of a finished run too late, a sentence; empty if there is nothing."""
    before = read_toml(folder / "job.toml").get("output", {})
    if not job.output.predictions or before.get("predictions"):
        return ""
    return (
        f"{folder}: its run is finished, so output.predictions writes nothing; predictions are written when the "
        "last round is scored"
    )


def check_more_rounds(job: Job, folder: Path, before: int, parts: Parts, clients: Collection[str]) -> None:
    """Refuse more rounds where those that were played would have been others.

    Args:
        job: the job with more rounds.
        folder: the stage's output folder.
        before: the rounds that the run began with.
        parts: the model's parts.
        clients: the clients' names.

    Raises:
        UserError: the learning-rate schedule or a plan depends on the number of rounds, or sites have forgotten.
    """
    short, streams = job.method.model_copy(update={"rounds": before}), Streams(job.train.seed)
    why = ""
    if job.between_sites:
        why = "between sites, which forget a run that is over"
    elif job.train.lr_schedule != "constant" or job.train.warmup_ratio:
        why = "as train.lr_schedule and train.warmup_ratio are shares of the whole run"
    elif any(
        len({make_plan(method, parts, job.task.kind, round, client, streams) for method in (short, job.method)})
        > 1
        for round in range(before)
        for client in sample_clients(list(clients), job.clients.fraction, round, streams)
    ):
        why = "as what this method trains in a round depends on their number"
    if why:
        raise UserError(f"{folder}: method.rounds: cannot be {job.method.rounds} instead of {before}, {why}")


def same_rows(folder: Path, rows: Fingerprints) -> None:
    """Write the fingerprints of the rows; or compare them with those that this folder's run began with.

    Raises:
        UserError: they differ, or the file with them is damaged or missing.
    """
    if any((folder / "state").glob(MANIFESTS)):
        check_rows(folder, rows)
    else:
        write_sealed(folder / "state" / "rows.json", rows)


def check_rows(folder: Path, rows: Fingerprints) -> None:
    """Compare the fingerprints of the rows with those that this folder's run began with.

    Raises:
        UserError: they differ, or the file with them is damaged or missing.
    """
    path = folder / "state" / "rows.json"
    before = read_sealed(path)
    if before is None:
        raise UserError(
            f"{path}: is damaged or missing, so that it cannot be told whether the rows are still the same"
        )
    if other := difference(before, rows):
        raise UserError(f"{folder}: cannot be resumed: {other}; a run goes on with the rows it began with")


def same_vocabulary(folder: Path, listed: Sequence[int]) -> None:
    """Write which tokens the public vocabulary lists; or compare them with those that this run began with.

    Nothing is done where there is none, and ``listed`` is empty.

    Raises:
        UserError: they differ, or the file with them is damaged or missing.
    """
    if not listed:
        return
    path = folder / "state" / "vocabulary.json"
    if not any((folder / "state").glob(MANIFESTS)):
        write_sealed(path, {"listed": list(listed)})
    elif read_sealed(path) != {"listed": list(listed)}:
        raise UserError(
            f"{folder}: cannot be resumed: [privacy] public_vocabulary: lists other tokens than when its run began"
        )


def without_none(data: Any) -> Any:
    """The same tables without empty values, which TOML cannot write; in a list one is called none."""
    if isinstance(data, dict):
        return {key: without_none(value) for key, value in data.items() if value is not None}
    if isinstance(data, list):
        return ["none" if value is None else without_none(value) for value in data]
    return data


def _tables(job: Job, components: Mapping[str, str]) -> dict[str, Any]:
    own = {"components": dict(components)} if components else {}
    return {"format": FORMAT, **without_none(job.dump()), **own}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs, the most telling key first: of another method not its options, but its name."""
    found = []
    for table in sorted(now.keys() | before.keys(), key=lambda name: (_place(name, ORDER), name)):
        old, new = before.get(table, {}), now.get(table, {})
        if not isinstance(new, dict) or not isinstance(old, dict):
            found += [Change(table, old, new)] if old != new else []
            continue
        told = repr if table == "data" else lambda value: value  # clients are in the order of their sources
        keys = {key for key in {**old, **new} if told(old.get(key)) != told(new.get(key))}
        keys -= set(FREE.get(table, ()))
        for key in sorted(keys, key=lambda name: (_place(name, FIRST), name)):
            found.append(Change(f"{table}.{key}", old.get(key), new.get(key)))
    return found


def _same_place(before: dict[str, Any], now: Mapping[str, Any]) -> None:
    """Clients on one machine may be played by another engine; an old folder does not say with how many threads."""
    before.setdefault("threads", now["threads"])
    if "flower" not in (before.get("name"), now["name"]):
        before["name"] = now["name"]


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def _refusal(change: Change, job: Job) -> str:
    """Why a change is not possible; empty if it is."""
    if change.key in RATES and job.privacy.level != "none":
        return "a round's messages may have left: made again at another rate, they would spend its epsilon twice"
    if change.key == "privacy.participations":
        return "its noise was calibrated for the rounds that it began with"
    if change.key in RATES:
        default = LEARNING_RATES.get(job.server.optimizer, 1.0)
        was, now = (default if value is None else value for value in (change.was, change.now))
        return "" if now <= was else "a learning rate may be lowered when a run is resumed, not raised"
    if change.key == "method.rounds":
        return "" if change.now > change.was else "a run that is resumed may get more rounds, not fewer"
    if change.key == "output.client_models":
        return ""
    return (
        "a resumed job must be the same, but for lower learning rates, more rounds of a run whose state is "
        "kept, and [output]"
    )
