"""What stays of a run's state when the run is finished, and whether it is still as it was left."""

from __future__ import annotations

import re
from pathlib import Path

from fedstrata.server.journal import Journal
from fedstrata.server.records import FileRecords
from fedstrata.server.state import JOURNAL, RECORDS, manifests, newest_commit
from fedstrata.wire.files import checksum_of, clear, write_sealed
from fedstrata.wire.store import Store

ROUND_FILES = ("round-[0-9]*.safetensors", ".round-*.part")
MODELS = tuple(f"{place}/*.{kind}" for place in ("model", "shared") for kind in ("safetensors", "json"))
"""What a later stage begins from."""
PARTITION = "partition.json"
"""What ``result.json`` is made again from, beside the records."""
CACHES = ("features.f32", "features.json")


def finish(folder: Path, keep_state: bool = False, keep_cache: bool = False) -> None:
    """Note in the newest commit that the run is finished, and drop what only resuming needs.

    The clients' own parts stay, and the whole state with ``keep_state``; feature caches with ``keep_cache``.
    """
    state, manifest = folder / "state", newest_commit(folder)
    assert manifest is not None
    records = FileRecords(folder)
    sizes = {name: path.stat().st_size for name in RECORDS if (path := records.path(name)).exists()}
    manifest["records"] = {name: (size, checksum_of(records.path(name))) for name, size in sizes.items()}
    newest, *older = manifests(folder)
    for path in () if keep_state else older:  # first, as their files will be gone
        path.unlink()
    kept = keep_state and manifest.get("kept", True)  # what was dropped once does not come back
    if "models" not in manifest:  # else a call has found the run finished: they are what another one left
        found = sorted(path for pattern in MODELS for path in folder.glob(pattern))
        manifest["models"] = {path.relative_to(folder).as_posix(): checksum_of(path) for path in found}
    manifest["partition"] = checksum_of(folder / PARTITION)
    write_sealed(newest, {**manifest, "finished": checksum_of(folder / "result.json"), "kept": kept})
    if not keep_cache:
        clear(state, CACHES)
    if not kept:
        _drop(state, records)


def _drop(state: Path, records: FileRecords) -> None:
    journal = Journal(state)
    journal.read(records.lines(JOURNAL))
    for name in ("received", "layers", "asked"):
        clear(state / name, ("[!.]*.safetensors", *ROUND_FILES))
    for path in (state / "clients").glob("*"):
        own = Store(path)
        for store in (own.residual, own.optimizer, own.late, own.between):
            clear(store.folder, ROUND_FILES)
        for old in sorted(path.glob(ROUND_FILES[0]))[:-1]:
            old.unlink()
    for path in state.glob("*@[0-9]*.safetensors"):
        if path.name.rpartition("@")[0] in journal.files:
            path.unlink()


def damaged_end(folder: Path) -> Path | None:
    """What a finished run has left behind and is no longer as it was written; None if all of it is."""
    manifest, records = newest_commit(folder), FileRecords(folder)
    assert manifest is not None
    if (wrong := records.damaged(manifest["records"])) is not None:
        return wrong
    if manifest.get("partition", was := checksum_of(folder / PARTITION)) != was:
        return folder / PARTITION
    journal = Journal(folder / "state")
    journal.read(records.lines(JOURNAL))
    if not manifest["kept"]:
        journal.files = {key: file for key, file in journal.files.items() if re.fullmatch("clients/[^/]+", key)}
    return journal.damaged()


def changed_model(folder: Path) -> Path | None:
    """A file of a finished run's model that is not as the run has left it; None if there is none."""
    manifest = newest_commit(folder)
    assert manifest is not None
    found = ((folder / name, was) for name, was in manifest.get("models", {}).items())
    return next((path for path, was in found if checksum_of(path) != was), None)
