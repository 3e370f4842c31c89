"""Late answers: requests of rounds that have ended without them, the model they started from, and what they count.

An answer that is n versions late is taken as its change against the version that its client had been sent, times
1 / sqrt(1 + n), added to the version that is current (FedBuff, Nguyen et al. 2022). The versions are the server's
own record of what it has sent, part by part; nothing that a client says of them is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.wire.codec import Wire
from fedstrata.wire.files import checksum_of
from fedstrata.wire.store import read_tensors, write_tensors

Version = tuple[str, int]
"""A part, and which version of it."""


@dataclass(frozen=True)
class Asked:
    """What a client was asked and has not answered.

    Attributes:
        round: of the request.
        versions: part -> version that the client trains from.
        first: see :class:`fedstrata.plan.messages.Request`.
        span: see :class:`fedstrata.plan.messages.Request`.
    """

    round: int
    versions: Mapping[str, int]
    first: bool
    span: tuple[float, float]


@dataclass
class Late:
    """What a server knows of the requests without an answer.

    Attributes:
        start: the start model's parts, which are version 0.
        folder: where the later versions of parts wait on the disk; None: in memory.
        asked: client -> what it has not answered, in the order of the rounds.
        files: version of a part -> checksum of its file.
        memory: version of a part -> it as it travelled, where there is no folder.
        unflushed: files that were written and may not be on the disk yet.
    """

    start: Weights = field(default_factory=dict)
    folder: Path | None = None
    asked: dict[str, Asked] = field(default_factory=dict)
    files: dict[Version, str] = field(default_factory=dict)
    memory: dict[Version, Tensors] = field(default_factory=dict)
    unflushed: list[Path] = field(default_factory=list)

    def ask(self, request: Request) -> None:
        """Note a request."""
        asked = Asked(request.round, dict(request.versions), request.first, request.span)
        self.asked[request.client] = asked

    def needed(self) -> set[Version]:
        """The versions from which clients without an answer train, but for the start model."""
        every = (version for asked in self.asked.values() for version in asked.versions.items())
        return {(part, version) for part, version in every if version}

    def keep(self, part: str, version: int, message: Tensors) -> None:
        """Keep a version of a part, whole and as it travels."""
        if self.folder is None:
            self.memory[part, version] = message
        else:
            path = self.path(part, version)
            self.files[part, version] = write_tensors(path, message, flushed=False)
            self.unflushed.append(path)

    def drop(self) -> None:
        """Forget the versions that are not needed any more; their files stay as long as commits name them."""
        needed = self.needed()
        self.memory = {key: message for key, message in self.memory.items() if key in needed}
        self.files = {key: checksum for key, checksum in self.files.items() if key in needed}

    def __contains__(self, key: Version) -> bool:
        return key in self.files or key in self.memory

    def message(self, part: str, version: int) -> Tensors:
        """A version that is kept, as it travelled."""
        if self.folder is None:
            return self.memory[part, version]
        return read_tensors(self.path(part, version))

    def unchanged(self, wire: Wire, part: str, version: int) -> Tensors:
        """A version as it comes back from a client that has learned nothing."""
        own = self.start[part]
        if version:
            return wire.decode(self.message(part, version), held=own)
        return own if wire.changes else wire.decode(wire.encode(own)[0], held=own)

    def path(self, part: str, version: int) -> Path:
        """The file of a version."""
        assert self.folder is not None
        return self.folder / file_of(part, version)

    def record(self) -> dict[str, Any]:
        """What of it belongs to a commit."""
        return {
            "asked": {client: asdict(asked) for client, asked in self.asked.items()},
            "files": [[part, version, checksum] for (part, version), checksum in sorted(self.files.items())],
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take over what a commit has recorded."""
        for client, asked in record["asked"].items():
            self.asked[client] = Asked(**{**asked, "span": tuple(asked["span"])})
        self.files = {(part, version): checksum for part, version, checksum in record["files"]}


def file_of(part: str, version: int) -> str:
    """The name of a version's file."""
    return f"{part}@{version}.safetensors"


def damaged_versions(folder: Path, record: Mapping[str, Any] | None) -> Path | None:
    """The first file of a commit that is not there as it was written.

    Args:
        folder: where they are.
        record: the commit's, see :meth:`Late.record`; None where it has none.
    """
    files = record["files"] if record else ()
    paths = ((folder / file_of(part, version), found) for part, version, found in files)
    return next((path for path, found in paths if checksum_of(path) != found), None)


def clear_versions(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Delete the files of versions that no commit names.

    Args:
        folder: where they are.
        records: of the commits that there are, see :meth:`Late.record`.
    """
    named = {file_of(part, version) for record in records for part, version, _ in record["files"]}
    for path in folder.glob("*@*.safetensors"):
        if path.name not in named:
            path.unlink()


def moved(new: Tensors, base: Tensors, now: Tensors, staleness: int) -> Tensors:
    """A late answer as if it were one to the current version.

    Args:
        new: what came back, fp32.
        base: the version that it started from, as it comes back from a client that has learned nothing.
        now: the current version likewise.
        staleness: versions between the two.
    """
    share = 1 / math.sqrt(1 + staleness)
    return {name: now[name] + (new[name] - base[name]) * share for name in now}


def lateness(current: Mapping[str, int], plan: Plan, asked: Asked) -> dict[str, int]:
    """When a client was asked, and how late its answer is: by versions, of several parts the most.

    Args:
        current: part -> its version.
        plan: the client's.
        asked: what it answers.
    """
    late = max((current[part] - asked.versions[part] for part in plan.send), default=0)
    return {"asked": asked.round, "staleness": late}
