"""A run's state on disk after each round: kill it anywhere, start it again, get the same weights.

    state/manifest-ROUNDS.json           what is current after so many rounds; writing it is what commits them
    state/journal.jsonl                  the newest file of each kind with its checksum, and what clients hold
    state/PART@VERSION.safetensors       a merged part (version 0 is the start model and is not stored)
    state/moments-PART@VERSION…          the server optimizer's memory of it
    state/residual-PART@VERSION…         what its messages have left out (error feedback)
    state/held-PART@VERSION…             a part as clients hold it, where changes travel on the way down
    state/changes-PART@VERSION…          the changes that led there
    state/asked/PART@VERSION…            a part from which clients train that have not answered yet
    state/layers/NAME/…                  what the optimizers of the server's own layers remember
    state/clients/NAME/…                 the parts a client keeps (:class:`fedstrata.wire.store.Store`)
    ledger.jsonl, rounds.jsonl, …        the records; cut back to their committed length on resumption

A manifest carries its own checksum, and length and checksum of the records and the journal; the journal has the
checksum of every other file. Two commits are kept: what damages the newest leaves the one before it to go on from.
A commit is taken at the end of its round and written while the next one runs, the manifest last.
Randomness needs no saving: every draw comes from a stream named by seed, round, client and use.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.server.commits import Commit, CommitWriter, part_files, read_commit
from fedstrata.server.journal import Journal
from fedstrata.server.late import Late, clear_versions, damaged_versions
from fedstrata.server.records import FileRecords
from fedstrata.server.server import Server
from fedstrata.wire.chain import Chains, saved
from fedstrata.wire.files import flush, write_sealed
from fedstrata.wire.on_disk import content, let_go
from fedstrata.wire.store import Store, read_tensors, write_tensors

JOURNAL = "state/journal"
RECORDS = ("ledger", "rounds", "missing", "lost", "outliers", "arrivals", "transport", JOURNAL)
MANIFESTS = "manifest-[0-9]*.json"
ASKED = "asked"
HELD = 2
"""Commits that are kept."""


def fingerprint(weights: Mapping[str, Tensors], settings: str = "") -> str:
    """A hash of all tensors, of config and tokenizer: tells whether a resumed run starts from the same model."""
    digest = hashlib.sha256(settings.encode())
    for tensors in weights.values():
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(content(tensor.contiguous().cpu()))
            let_go([tensor])
    return digest.hexdigest()


class RunState:
    """The state of one stage's run.

    Attributes:
        records: the run's records.
        store: the folder ``state``; what is written through it is part of the next commit.
        missed: clients without a reply since the newest commit.

    Args:
        folder: the stage's output folder.
        start: fingerprint of the start model.
    """

    def __init__(self, folder: Path, start: str) -> None:
        self.folder, self.start = folder, start
        self.state = folder / "state"
        self.records = FileRecords(folder)
        self.journaled = FileRecords(folder)  # the journal's file alone, which the writer adds to
        self.journal = Journal(self.state)
        self.store = Store(self.state, self.journal.note)
        self.writer = CommitWriter(folder, self._write)
        self.manifest: dict[str, Any] = {}
        self.missed: list[str] = []

    def reopen(self) -> tuple[int, str]:
        """Find the newest intact commit and cut the records back to it.

        Returns:
            The number of rounds done, and a sentence on what was damaged; empty if nothing was.

        Raises:
            UserError: no commit is intact, or the run began from another start model.
        """
        commits = manifests(self.folder)
        if not commits:
            self._begin()
            return 0, ""
        self.manifest, lost = self._newest_intact(commits)
        done = int(self.manifest["done"])
        for path in commits:
            if path.name > self._path(done).name:
                path.unlink()
        self.missed = [line["client"] for line in self.records.lines_after("missing", self.manifest["records"])]
        self.records.cut(self.manifest["records"], RECORDS[:-1])
        self.journaled.cut(self.manifest["records"], (JOURNAL,))
        self.journal.read(self.journaled.lines(JOURNAL))
        self._drop_unfinished()
        if lost is None:
            return done, ""
        after = f"after round {done}" if done else "before the first round"
        return done, f"{lost} is damaged or missing; the run goes on from its state {after}, which is intact"

    def restore(self, server: Server, sites: bool = True) -> tuple[int, float]:
        """Bring a fresh server to the commit; returns the number of rounds done and the seconds that they took.

        Of clients that are ``sites`` one without a reply since then may have lost its disk.
        """
        server.versions = {**server.versions, **self.manifest["versions"]}
        server.client_versions |= self.journal.clients
        for client in self.missed if sites else ():  # else it is asked each time to go on from what it lost
            if client in server.client_versions:  # else it has not even been sent the start model
                server.forget(client)
        for part in [part for part, version in server.versions.items() if version]:
            server.weights[part] = self._read(part)
            for key, tensor in self._read(f"moments-{part}").items():
                kind, name = key.split("|", 1)
                server.moments.setdefault(name, {})[kind] = tensor
            if residual := self._read(f"residual-{part}"):
                server.residual[part] = residual
        if server.chains:
            self._restore_chains(server.chains)
        if "late" in self.manifest:
            server.late.restore(self.manifest["late"])
        return self.manifest["done"], self.manifest["seconds"]

    def commit(self, server: Server, changed: Iterable[str], done: int, seconds: float) -> None:
        """Make ``done`` rounds the state of the run; it is written while the run goes on.

        Args:
            server: the server after the last of them.
            changed: parts merged since the last commit.
            done: number of rounds done.
            seconds: clock time of the run so far.

        Raises:
            UserError: the commit before this one could not be written.
        """
        self.writer.wait()
        self.journal.note_clients(server.take_moved())
        self.manifest = {"done": done, "seconds": seconds, "start": self.start, "versions": dict(server.versions)}
        unflushed = self._take_late(server.late)
        commit = Commit(
            manifest=self.manifest,
            files=[
                *(file for part in changed for file in part_files(self.state, server, part)),
                *self._chain_files(server),
            ],
            lines=self.journal.take(),
            unflushed=[*unflushed, *self.journal.take_unflushed(), *self.records.take_unflushed()],
            marks=self.records.marks(),
        )
        self.writer.begin(commit)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Inside, rounds are committed; at its end, and also where an exception leaves it, they are written.

        Raises:
            UserError: the last commit could not be written.
        """
        try:
            yield
            self.writer.wait()
        finally:
            self.writer.close()

    def _take_late(self, late: Late) -> list[Path]:
        """Make what late answers need part of the manifest, drop what no commit needs; the files to be flushed."""
        if late.folder is None:
            return []
        self.manifest["late"] = late.record()
        tables = [self.manifest, *(read_commit(path) or {} for path in manifests(self.folder))]
        clear_versions(late.folder, [table["late"] for table in tables if "late" in table])
        unflushed, late.unflushed = late.unflushed, []
        return unflushed

    def _write(self, commit: Commit) -> None:
        """Write a commit: its manifest, by which it holds, after all its files; then delete what it replaces."""
        lines = [*commit.lines]
        for key, path, tensors in commit.files:
            lines.append(self.journal.line(key, path, write_tensors(path, tensors)))
        self.journal.read(lines[len(commit.lines) :])
        if lines:
            self.journaled.append(JOURNAL, lines)
        for path in (*commit.unflushed, *self.journaled.take_unflushed()):
            flush(path)
        records = {**commit.marks, **self.journaled.marks()}
        write_sealed(self._path(commit.manifest["done"]), {**commit.manifest, "records": records})
        for old in manifests(self.folder)[HELD:]:
            old.unlink()
        for files in self._part_files().values():
            for _, path in files[:-HELD]:
                path.unlink()

    def _begin(self) -> None:
        """Commit that no round is done, so that a run without any commit is one that nothing was written of."""
        left = [path for path in map(self.records.path, RECORDS) if path.exists()]
        if left := [*left, *self.state.glob("*@*.safetensors")]:
            raise UserError(
                f"{self.folder}: cannot be resumed: {self.state / 'manifest-*.json'} is missing, "
                f"while there is {left[0].name}; name another folder to begin anew"
            )
        self.manifest = {"done": 0, "seconds": 0.0, "start": self.start, "versions": {}}
        self._write(Commit(self.manifest, (), (), (), {}))

    def _newest_intact(self, commits: Iterable[Path]) -> tuple[dict[str, Any], Path | None]:
        """The newest commit all of whose files are as they were written, and what was damaged of a newer one."""
        lost: Path | None = None
        for path in commits:
            manifest = read_commit(path)
            if manifest and manifest["start"] != self.start:
                raise UserError(
                    f"{self.folder}: cannot be resumed, its run began from other weights, or another config or "
                    "tokenizer, than the job's model has now"
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
        try:
            journal.read(self.records.lines_to(JOURNAL, manifest["records"]))
        except (KeyError, TypeError, ValueError):  # lines of another kind, in a folder that somebody has made
            return self.records.path(JOURNAL)
        return journal.damaged() or damaged_versions(self.state / ASKED, manifest.get("late"))

    def _chain_files(self, server: Server) -> Iterator[tuple[Path, Path, Tensors]]:
        """What clients hold of the parts of which that has changed since it was last written."""
        for part, chain in server.chains.each.items() if server.chains else ():
            for kind, tensors in saved(chain).items():
                key, path = f"{kind}{part}", self.state / f"{kind}{part}@{chain.version}.safetensors"
                if chain.version and self.journal.path(key) != path:
                    yield self.state / key, path, tensors

    def _restore_chains(self, chains: Chains) -> None:
        for part in chains.each:
            if path := self.journal.path(f"held-{part}"):
                version = int(path.stem.rpartition("@")[2])
                chains.restore(part, version, read_tensors(path), self._read(f"changes-{part}"))

    def _read(self, key: str) -> Tensors:
        path = self.journal.path(key)
        return {} if path is None else read_tensors(path)

    def _drop_unfinished(self) -> None:
        """Delete the versions of parts that the journal does not know yet; they would count as the newest."""
        for key, files in self._part_files().items():
            newest = self.state / self.journal.files[key][0]
            for _, path in files[[path for _, path in files].index(newest) + 1 :]:
                path.unlink()

    def _part_files(self) -> dict[str, list[tuple[int, Path]]]:
        """Of every part, and of what goes with it, the versions that are on the disk, ascending."""
        versions: dict[str, list[tuple[int, Path]]] = defaultdict(list)
        for path in self.state.glob("*@*.safetensors"):
            found = re.fullmatch(r"(.+)@(\d+)", path.stem)
            if found and found[1] in self.journal.files:
                versions[found[1]].append((int(found[2]), path))
        return {key: sorted(files) for key, files in versions.items()}

    def _path(self, done: int) -> Path:
        return self.state / f"manifest-{done:06d}.json"


def manifests(folder: Path) -> list[Path]:
    """The commits, the newest first."""
    return sorted((folder / "state").glob(MANIFESTS), reverse=True)


def newest_commit(folder: Path) -> dict[str, Any] | None:
    """The newest commit as it was written; None if it is damaged, or there is none."""
    return next(map(read_commit, manifests(folder)), None)
