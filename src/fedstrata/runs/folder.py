"""The output folder of a run: whose it is, and what it says however the run ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

import tomli_w
from filelock import FileLock, Timeout

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.job.toml import read_toml
from fedstrata.models.folders import FILES
from fedstrata.plan.kinds import AUDIT, FORMAT, LOCK, TRACK
from fedstrata.runs.result_file import write_result
from fedstrata.wire.files import endless_file, write_bytes

MARKER = ".fedstrata"
"""The file by which a folder is known as one that FedStrata writes."""


RECORDS = (
    *("job.toml", "choices.toml", "environment.json", "partition.json", "parts.json", "classes.json"),
    *("rounds.jsonl", "ledger.jsonl", "missing.jsonl", "lost.jsonl", "outliers.jsonl", "arrivals.jsonl"),
    *("transport.jsonl", "predictions.jsonl", "result.json", "report.html", AUDIT),
)
"""Files of a run or a stage; below ``state/`` and the other folders here all files are its own."""
OWN_FOLDERS = ("state", TRACK, "onnx", "sentence-transformers")
REPLACED = ("state", "start", "model", "shared", "clients", "adapter", "base")
"""Folders of a run or a stage whose files a run that goes on deletes and writes anew."""


def somebodys_file(folder: Path) -> Path | None:
    """A file that somebody has put into a run's folder, which writes none of that name there; None without one."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        words = inside[2:] if inside[0] == "stages" else inside
        known = RECORDS if len(words) == 1 else FILES
        hidden = any(word.startswith(".") for word in inside)  # the folder's marks, and what is half written
        own = hidden or not {*words[:1]}.isdisjoint(OWN_FOLDERS)
        if not path.is_dir() and not own and not any(fnmatch(path.name, name) for name in known):
            return path
    return None


def check_output_dir(folder: Path, resume: bool, kind: str = "run") -> None:
    """Check that the output folder can be this run's; nothing is written yet.

    Args:
        folder: the folder.
        resume: whether what it holds is to be continued.
        kind: what writes it, ``run`` or ``sweep``.

    Raises:
        UserError: it holds something and the run is not to be resumed, or it holds no run, or it or a folder above
            it is a file.
    """
    if "\0" in str(folder):
        raise UserError(f"[output] dir: {str(folder)!r} is no name that a folder can have")
    if os.pardir in folder.parts:
        folder = Path(os.path.realpath(folder))  # "new/.." is this folder, and there as soon as "new" is made
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not above.is_dir():
        what = "a file" if above.is_file() else "no folder"
        raise UserError(f"[output] dir: {above} is {what}; name a new or empty folder")
    track = [TRACK] if (folder / MARKER).exists() else []
    begun = (MARKER, f".{MARKER}.part", LOCK, AUDIT, *track)  # and nothing more
    if not folder.exists() or all(path.name in begun for path in folder.iterdir()):
        return
    if not resume:
        raise UserError(
            f"[output] dir: {folder} is not empty; continue its run with --resume or name another folder "
            "(output.dir=...)"
        )
    _check_begun(folder, kind)


def _check_begun(folder: Path, kind: str) -> None:
    """Check that what a folder holds can be continued; ``kind`` as of :func:`check_output_dir`."""
    if not (folder / MARKER).exists():
        for path in (folder / "job.toml", *sorted(folder.glob("stages/*/job.toml"))[:1]):
            if path.is_file():
                check_format(folder, read_toml(path).get("format"))
        raise UserError(
            f"[output] dir: {folder} is not a folder that FedStrata has written (it has no file {MARKER}), so "
            "there is nothing to resume and nothing in it is touched; name a new or empty folder"
        )
    if endless := endless_file(folder):
        raise UserError(f"[output] dir: {endless} is a pipe or a device; a run that goes on expects a file there")
    marker = read_toml(folder / MARKER)
    check_format(folder, marker.get("format"))
    if marker.get("kind") != kind:
        raise UserError(f"[output] dir: {folder} holds a {marker.get('kind')}, not a {kind}; name another folder")


def check_format(folder: Path, found: object) -> None:
    """Refuse a folder that another version wrote.

    Raises:
        UserError: its format is not this version's.
    """
    if found != FORMAT:
        was = "has no format number" if found is None else f"has format {found}"
        raise UserError(
            f"{folder}: cannot be resumed: it {was}, this version of FedStrata writes format {FORMAT}; since "
            "format 2 job keys have other names (docs/job.md, Renamed keys), and so have parts and payloads; "
            "since format 3 every file of a run's state has a checksum"
        )


def mark(folder: Path, kind: str = "run") -> None:
    """Make the folder one of FedStrata's own.

    Raises:
        UserError: it holds something that is not.
    """
    check_output_dir(folder, True, kind)
    if not (folder / MARKER).exists():
        write_bytes(folder / MARKER, tomli_w.dumps({"format": FORMAT, "kind": kind}).encode())


def check_no_links(folder: Path) -> None:
    """Refuse a folder in which others stand in the places of a run's own: what is in them is somebody's.

    Raises:
        UserError: one does.
    """
    stages = sorted((folder / "stages").glob("*"))
    places = [folder / "stages", *stages, *(each / name for each in (folder, *stages) for name in REPLACED)]
    if (link := next((path for path in places if path.is_symlink()), None)) is not None:
        raise UserError(
            f"[output] dir: {link} is a link, and a run that goes on replaces what is there; expected a folder"
        )


@contextmanager
def own_folder(folder: Path, resume: bool) -> Iterator[None]:
    """Hold a run's output folder, so that no other process runs in it; one that nothing was written to goes again.

    Raises:
        UserError: another process holds it, or :func:`check_output_dir` or :func:`check_no_links` objects.
    """
    if not (folder / LOCK).exists():  # else somebody is at it: that is said first
        check_output_dir(folder, resume)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    new = not (folder / MARKER).exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"[output] dir: {folder}: another process is running in this folder") from None
    try:
        check_output_dir(folder, resume)
        mark(folder)
        check_no_links(folder)
        yield
    finally:
        if new and all(path.name in (MARKER, LOCK) for path in folder.iterdir()):
            with suppress(OSError):
                for name in (MARKER, LOCK):
                    (folder / name).unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
        lock.release()


@contextmanager
def status_on_disk(job: Job, folder: Path) -> Iterator[None]:
    """Leaves a true ``result.json`` behind, however the stage ends.

    Where it cannot be written either, as on a full disk, what ended the stage is told all the same.
    """
    try:
        yield
    except KeyboardInterrupt:
        with suppress(Exception):
            write_result(job, folder, "stopped", "stopped by the user; --resume continues it")
        raise
    except Exception as error:
        with suppress(Exception):
            write_result(job, folder, "failed", str(error) or type(error).__name__)
        raise
    write_result(job, folder, "finished", None)
