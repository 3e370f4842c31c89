"""The output folder of a run: whose it is, and what it says however the run ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import FORMAT
from fedstrata.runs.result import write_result
from fedstrata.wire.files import write_bytes


def check_output_dir(folder: Path, resume: bool) -> None:
    """Check that the output folder can be this run's; nothing is written yet.

    Raises:
        UserError: it holds something and the run is not to be resumed, or it or a folder above it is a file.
    """
    if "\0" in str(folder):
        raise UserError(f"[output] dir: {str(folder)!r} is no name that a folder can have")
    if os.pardir in folder.parts:
        folder = Path(os.path.realpath(folder))  # "new/.." is this folder, and there as soon as "new" is made
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not above.is_dir():
        what = "a file" if above.is_file() else "no folder"
        raise UserError(f"[output] dir: {above} is {what}; name a new or empty folder")
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise UserError(
            f"[output] dir: {folder} is not empty; continue its run with --resume or name another folder "
            "(output.dir=...)"
        )


def same_job(job: Job, folder: Path, components: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the resolved job; or compare it with the one that this folder's run began with.

    Args:
        job: the job.
        folder: the stage's output folder.
        components: identities of the caller's own objects.

    Raises:
        UserError: they differ in a key that a result depends on, the folder was written in another format, or
            its ``job.toml`` is damaged.
    """
    path = folder / "job.toml"
    now = {"format": FORMAT, **without_none(job.dump())}
    if components:
        now["components"] = dict(components)
    free = ("deadline", "quorum", "federation", "insecure")  # of the engine; a run may go on with others
    if path.exists():
        before = read_toml(path)
        check_format(folder, before.get("format"))
        for table in sorted((now.keys() | before.keys()) - {"output"}):
            old, new = (tables.get(table, {}) for tables in (before, now))
            if old != new:
                keys = (
                    {table}
                    if not isinstance(old, dict)
                    else {k for k in {**old, **new} if old.get(k) != new.get(k)}
                )
                keys -= set(free) if table == "engine" else set()
                if not keys:
                    continue
                key = sorted(keys)[0]
                raise UserError(
                    f"{folder}: its run began with {table}.{key} = {_value(old, key)}, the job now says "
                    f"{_value(new, key)}; a resumed job must be the same"
                )
    else:
        write_bytes(path, tomli_w.dumps(now).encode())


def check_format(folder: Path, found: object) -> None:
    """Refuse a folder that another version wrote.

    Raises:
        UserError: its format is not this version's.
    """
    if found != FORMAT:
        was = "has no format number" if found is None else f"has format {found}"
        raise UserError(
            f"{folder}: cannot be resumed: it {was}, this version of FedStrata writes format {FORMAT}; since "
            "format 2 job keys have other names (docs/job.md, Renamed keys), and so have parts and payloads"
        )


def _value(table: Any, key: str) -> str:
    return repr(table.get(key, "nothing")) if isinstance(table, dict) else repr(table)


def without_none(data: Any) -> Any:
    """The same tables without empty values, which TOML cannot write."""
    if isinstance(data, dict):
        return {key: without_none(value) for key, value in data.items() if value is not None}
    return data


@contextlib.contextmanager
def status_on_disk(job: Job, folder: Path) -> Iterator[None]:
    """Leaves a true ``result.json`` behind, however the stage ends."""
    try:
        yield
    except KeyboardInterrupt:
        write_result(job, folder, "stopped", "stopped by the user; --resume continues it")
        raise
    except Exception as error:
        write_result(job, folder, "failed", str(error) or type(error).__name__)
        raise
    write_result(job, folder, "finished", None)
