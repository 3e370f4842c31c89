"""A run's state on disk after each round: kill it anywhere, start it again, get the same weights.

    state/manifest.json              what is current; replacing it is what commits a round
    state/PART@VERSION.safetensors   a merged part (version 0 is the start model and is not stored)
    state/moments-PART@VERSION…      the server optimizer's memory of it
    state/residual-PART@VERSION…         what its messages have left out (error feedback)
    state/layers/NAME/…              what the optimizers of the server's own layers remember
    state/clients/NAME/…             the parts a client keeps (:class:`fedstrata.wire.store.Store`)
    ledger.jsonl, rounds.jsonl, …    the records; cut back to their committed length on resumption

Randomness needs no saving: every draw comes from a stream named by seed, round, client and use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.server.server import Server
from fedstrata.wire.files import write_bytes
from fedstrata.wire.store import Store, read_tensors, write_tensors

RECORDS = ("ledger.jsonl", "rounds.jsonl", "missing.jsonl", "transport.jsonl")


def fingerprint(weights: Mapping[str, Tensors]) -> str:
    """A hash of all tensors: tells whether a resumed run starts from the same model."""
    digest = hashlib.sha256()
    for tensors in weights.values():
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def commit(folder: Path, server: Server, changed: Iterable[str], done: int, start: str, seconds: float) -> None:
    """Make ``done`` rounds the state of the run.

    Args:
        folder: the run's output folder.
        server: the server after the last of them.
        changed: parts merged since the last commit.
        done: number of rounds done.
        start: fingerprint of the start model.
        seconds: clock time of the run so far.
    """
    state = folder / "state"
    for part in changed:
        write_tensors(_path(state, server, part), server.weights[part])
        moments = {
            f"{kind}|{name}": tensor
            for name in server.parts.shapes[part]
            for kind, tensor in server.moments.get(name, {}).items()
        }
        for kind, tensors in (("moments-", moments), ("residual-", server.residual.get(part))):
            if tensors:
                write_tensors(_path(state, server, part, kind), tensors)
    manifest = {
        "done": done,
        "start": start,
        "seconds": seconds,
        "versions": server.versions,
        "client_versions": server.client_versions,
        "records": {name: _size(folder / name) for name in RECORDS},
    }
    write_bytes(state / "manifest.json", json.dumps(manifest, ensure_ascii=False).encode())
    current = {
        _path(state, server, part, kind) for part in server.parts.names for kind in ("", "moments-", "residual-")
    }
    for path in state.glob("*@*.safetensors"):
        if path not in current:
            path.unlink()


def prune(folder: Path, keep_cache: bool = False) -> None:
    """Drop what only resuming needs, once the run is finished; the clients' own parts stay.

    Feature caches go too, unless ``keep_cache``.
    """
    for path in (folder / "state").glob("*.*"):
        path.unlink()
    for path in (folder / "state" / "clients").glob("*"):
        for store in (Store(path).residual, Store(path).optimizer):
            shutil.rmtree(store.folder, ignore_errors=True)
    for name in ("received", "layers"):
        shutil.rmtree(folder / "state" / name, ignore_errors=True)
    if not keep_cache:
        for path in list((folder / "state").glob("**/features.f32")):
            shutil.rmtree(path.parent)


def restore(folder: Path, server: Server, start: str) -> tuple[int, float]:
    """Bring a fresh server to the last committed round and cut the records back to it.

    Returns:
        The number of rounds done and the seconds they took; (0, 0) where nothing was committed.

    Raises:
        UserError: the run began from another start model.
    """
    state = folder / "state"
    if not (state / "manifest.json").exists():
        for name in RECORDS:
            (folder / name).unlink(missing_ok=True)
        return 0, 0.0
    manifest = json.loads((state / "manifest.json").read_text(encoding="utf-8"))
    if manifest["start"] != start:
        raise UserError(
            f"{folder}: cannot be resumed, its run began from other weights than the job's model has now"
        )
    server.versions, server.client_versions = manifest["versions"], manifest["client_versions"]
    for part, version in server.versions.items():
        if version:
            server.weights[part] = read_tensors(_path(state, server, part))
            moments = _path(state, server, part, "moments-")
            for key, tensor in read_tensors(moments).items() if moments.exists() else ():
                kind, name = key.split("|", 1)
                server.moments.setdefault(name, {})[kind] = tensor
            if (residual := _path(state, server, part, "residual-")).exists():
                server.residual[part] = read_tensors(residual)
    for name, size in manifest["records"].items():
        if (folder / name).exists():
            os.truncate(folder / name, size)
    return manifest["done"], manifest["seconds"]


def _path(state: Path, server: Server, part: str, kind: str = "") -> Path:
    return state / f"{kind}{part}@{server.versions[part]}.safetensors"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
