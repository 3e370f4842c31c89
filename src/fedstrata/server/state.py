"""A run's state on disk after each round: kill it anywhere, start it again, get the same weights.

    state/manifest-ROUNDS.json           what is current after so many rounds; writing it is what commits them
    state/journal.jsonl                  the newest file of each kind with its checksum, and what clients hold
    state/PART@VERSION.safetensors       a merged part (version 0 is the start model and is not stored)
    state/moments-PART@VERSION…          the server optimizer's memory of it
    state/residual-PART@VERSION…         what its messages have left out (error feedback)
    state/held-PART@VERSION…             a part as clients hold it, where changes travel on the way down
    state/changes-PART@VERSION…          the changes that led there
    state/layers/NAME/…                  what the optimizers of the server's own layers remember
    state/clients/NAME/…                 the parts a client keeps (:class:`fedstrata.wire.store.Store`)
    ledger.jsonl, rounds.jsonl, …        the records; cut back to their committed length on resumption

A manifest carries its own checksum, and length and checksum of the records and the journal; the journal has the
checksum of every other file. Two commits are kept: what damages the newest leaves the one before it to go on from.
Randomness needs no saving: every draw comes from a stream named by seed, round, client and use.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.server.journal import Journal
from fedstrata.server.records import FileRecords
from fedstrata.server.server import Server
from fedstrata.wire.chain import Chain, Chains, saved
from fedstrata.wire.files import checksum_of, clear, read_sealed, write_sealed
from fedstrata.wire.store import Store, read_tensors, write_tensors

JOURNAL = "state/journal"
RECORDS = ("ledger", "rounds", "missing", "transport", JOURNAL)
MANIFESTS = "manifest-[0-9]*.json"
HELD = 2
"""Commits that are kept."""
ROUND_FILES = ("round-[0-9]*.safetensors", ".round-*.part")
CACHES = ("features.f32", "features.json")


def fingerprint(weights: Mapping[str, Tensors], tokenizer: str = "") -> str:
    """A hash of all tensors, and of a tokenizer: tells whether a resumed run starts from the same model."""
    digest = hashlib.sha256(tokenizer.encode())
    for tensors in weights.values():
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


class RunState:
    """The state of one stage's run.

    Attributes:
        records: the run's records.
        store: the folder ``state``; what is written through it is part of the next commit.

    Args:
        folder: the stage's output folder.
        start: fingerprint of the start model.
    """

    def __init__(self, folder: Path, start: str) -> None:
        self.folder, self.start = folder, start
        self.state = folder / "state"
        self.records = FileRecords(folder)
        self.journal = Journal(self.state)
        self.store = Store(self.state, self.journal.note)
        self.manifest: dict[str, Any] = {}

    def reopen(self) -> tuple[int, str]:
        """Find the newest intact commit and cut the records back to it.

        Returns:
            The number of rounds done, and a sentence on what was damaged; empty if nothing was.

        Raises:
            UserError: no commit is intact, or the run began from another start model.
        """
        commits = _manifests(self.folder)
        if not commits:
            self._begin()
            return 0, ""
        self.manifest, lost = self._newest_intact(commits)
        done = int(self.manifest["done"])
        for path in commits:
            if path.name > self._path(done).name:
                path.unlink()
        self.records.cut(self.manifest["records"], RECORDS)
        self.journal.read(self.records.lines(JOURNAL))
        if lost is None:
            return done, ""
        after = f"after round {done}" if done else "before the first round"
        return done, f"{lost} is damaged or missing; the run goes on from its state {after}, which is intact"

    def restore(self, server: Server) -> tuple[int, float]:
        """Bring a fresh server to the commit; returns the number of rounds done and the seconds that they took."""
        server.versions = {**server.versions, **self.manifest["versions"]}
        names = server.parts.names
        for client, held in self.journal.clients.items():
            server.client_versions[client] = dict(zip(names, held, strict=True))
        for part in [part for part, version in server.versions.items() if version]:
            server.weights[part] = self._read(part)
            for key, tensor in self._read(f"moments-{part}").items():
                kind, name = key.split("|", 1)
                server.moments.setdefault(name, {})[kind] = tensor
            if residual := self._read(f"residual-{part}"):
                server.residual[part] = residual
        if server.chains:
            self._restore_chains(server.chains)
        return self.manifest["done"], self.manifest["seconds"]

    def commit(self, server: Server, changed: Iterable[str], done: int, seconds: float) -> None:
        """Make ``done`` rounds the state of the run.

        Args:
            server: the server after the last of them.
            changed: parts merged since the last commit.
            done: number of rounds done.
            seconds: clock time of the run so far.
        """
        for part in changed:
            self._write(server, part)
        for part, chain in server.chains.each.items() if server.chains else ():
            self._write_chain(part, chain)
        names = server.parts.names
        held = {client: [own[part] for part in names] for client, own in server.client_versions.items()}
        self.journal.note_clients(held)
        self.records.append(JOURNAL, self.journal.take())
        self._commit(done, seconds, server.versions)
        for old in _manifests(self.folder)[HELD:]:
            old.unlink()
        self._drop_parts()

    def _commit(self, done: int, seconds: float, versions: Mapping[str, int]) -> None:
        self.manifest = {"done": done, "seconds": seconds, "start": self.start, "versions": versions}
        write_sealed(self._path(done), {**self.manifest, "records": self.records.marks()})

    def _begin(self) -> None:
        """Commit that no round is done, so that a run without any commit is one that nothing was written of."""
        left = [path for path in map(self.records.path, RECORDS) if path.exists()]
        if left := [*left, *self.state.glob("*@*.safetensors")]:
            raise UserError(
                f"{self.folder}: cannot be resumed: {self.state / 'manifest-*.json'} is missing, "
                f"while there is {left[0].name}; name another folder to begin anew"
            )
        self._commit(0, 0.0, {})

    def _newest_intact(self, commits: Iterable[Path]) -> tuple[dict[str, Any], Path | None]:
        """The newest commit all of whose files are as they were written, and what was damaged of a newer one."""
        lost: Path | None = None
        for path in commits:
            manifest = read_sealed(path)
            if manifest and manifest["start"] != self.start:
                raise UserError(
                    f"{self.folder}: cannot be resumed, its run began from other weights or another tokenizer "
                    "than the job's model has now"
                )
            wrong = self._damaged(manifest) if manifest else path
            if manifest and not wrong:
                return manifest, lost
            lost = lost or wrong
        raise UserError(
            f"{self.folder}: cannot be resumed: {lost} is damaged or missing, and no intact state before it "
            "is left"
        )

    def _damaged(self, manifest: Mapping[str, Any]) -> Path | None:
        if (wrong := self.records.damaged(manifest["records"])) is not None:
            return wrong
        journal = Journal(self.state)
        journal.read(self.records.lines_to(JOURNAL, manifest["records"]))
        return journal.damaged()

    def _write(self, server: Server, part: str) -> None:
        moments = {
            f"{kind}|{name}": tensor
            for name in server.parts.shapes[part]
            for kind, tensor in server.moments.get(name, {}).items()
        }
        kinds = {"": server.weights[part], "moments-": moments, "residual-": server.residual.get(part)}
        for kind, tensors in kinds.items():
            if tensors:
                path = self.state / f"{kind}{part}@{server.versions[part]}.safetensors"
                self.journal.note(self.state / f"{kind}{part}", path, write_tensors(path, tensors))

    def _write_chain(self, part: str, chain: Chain) -> None:
        """What clients hold of a part, where that has changed since it was last written."""
        for kind, tensors in saved(chain).items():
            path = self.state / f"{kind}{part}@{chain.version}.safetensors"
            if chain.version and self.journal.path(f"{kind}{part}") != path:
                self.journal.note(self.state / f"{kind}{part}", path, write_tensors(path, tensors))

    def _restore_chains(self, chains: Chains) -> None:
        for part in chains.each:
            if path := self.journal.path(f"held-{part}"):
                version = int(path.stem.rpartition("@")[2])
                chains.restore(part, version, read_tensors(path), self._read(f"changes-{part}"))

    def _read(self, key: str) -> Tensors:
        path = self.journal.path(key)
        return {} if path is None else read_tensors(path)

    def _drop_parts(self) -> None:
        """Delete the versions of parts that none of the kept commits needs."""
        versions: dict[str, list[tuple[int, Path]]] = defaultdict(list)
        for path in self.state.glob("*@*.safetensors"):
            found = re.fullmatch(r"(.+)@(\d+)", path.stem)
            if found and found[1] in self.journal.files:
                versions[found[1]].append((int(found[2]), path))
        for files in versions.values():
            for _, path in sorted(files)[:-HELD]:
                path.unlink()

    def _path(self, done: int) -> Path:
        return self.state / f"manifest-{done:06d}.json"


def _manifests(folder: Path) -> list[Path]:
    """The commits, the newest first."""
    return sorted((folder / "state").glob(MANIFESTS), reverse=True)


def newest_commit(folder: Path) -> dict[str, Any] | None:
    """The newest commit as it was written; None if it is damaged, or there is none."""
    return next(map(read_sealed, _manifests(folder)), None)


def finish(folder: Path, keep_state: bool = False, keep_cache: bool = False) -> None:
    """Note in the newest commit that the run is finished, and drop what only resuming needs.

    The clients' own parts stay, and the whole state with ``keep_state``; feature caches with ``keep_cache``.
    """
    state, manifest = folder / "state", newest_commit(folder)
    assert manifest is not None
    records = FileRecords(folder)
    sizes = {name: path.stat().st_size for name in RECORDS if (path := records.path(name)).exists()}
    manifest["records"] = {name: (size, checksum_of(records.path(name))) for name, size in sizes.items()}
    newest, *older = _manifests(folder)
    for path in () if keep_state else older:  # first, as their files will be gone
        path.unlink()
    kept = keep_state and manifest.get("kept", True)  # what was dropped once does not come back
    write_sealed(newest, {**manifest, "finished": checksum_of(folder / "result.json"), "kept": kept})
    if not keep_cache:
        clear(state, CACHES)
    if not kept:
        _drop(state, records)


def _drop(state: Path, records: FileRecords) -> None:
    journal = Journal(state)
    journal.read(records.lines(JOURNAL))
    for name in ("received", "layers"):
        clear(state / name, ("[!.]*.safetensors", *ROUND_FILES))
    for path in (state / "clients").glob("*"):
        for store in (Store(path).residual, Store(path).optimizer):
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
    journal = Journal(folder / "state")
    journal.read(records.lines(JOURNAL))
    if not manifest["kept"]:
        journal.files = {key: file for key, file in journal.files.items() if re.fullmatch("clients/[^/]+", key)}
    return journal.damaged()
