"""Commits: a round's state, taken when the round ends and written to the disk while the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, ValidationError

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.server.optimizer import AdaptiveOptimizer
from fedstrata.server.records import Mark
from fedstrata.server.server import Server
from fedstrata.wire.files import read_sealed


class LateRecord(BaseModel):
    """See :meth:`fedstrata.server.late.Late.record`."""

    asked: dict[str, dict[str, Any]]
    files: list[tuple[str, NonNegativeInt, str]]


class Manifest(BaseModel):
    """What the manifest of any commit holds."""

    done: NonNegativeInt
    seconds: NonNegativeFloat
    start: str
    versions: dict[str, NonNegativeInt]
    records: dict[str, tuple[NonNegativeInt, str]]
    late: LateRecord | None = None


@dataclass(frozen=True)
class Commit:
    """A run's state after a round, as it was at that moment.

    Attributes:
        manifest: what is current, without the records' marks.
        files: of what a file is the newest, the file, and what is to be written into it.
        lines: what the journal has to say of this round, but for ``files``.
        unflushed: files that were written during the round and may not be on the disk yet.
        marks: how far the records go.
    """

    manifest: Mapping[str, Any]
    files: Sequence[tuple[Path, Path, Tensors]]
    lines: Sequence[Mapping[str, Any]]
    unflushed: Sequence[Path]
    marks: Mapping[str, Mark]


def read_commit(path: Path) -> dict[str, Any] | None:
    """A manifest as it was written; None if it is damaged, or no run's, although its checksum is right."""
    table = read_sealed(path)
    try:
        Manifest.model_validate(table)
    except ValidationError:
        return None
    return table


def part_files(folder: Path, server: Server, part: str) -> list[tuple[Path, Path, Tensors]]:
    """What is stored of a part: its weights, its optimizer's memory, and what its messages have left out.

    The tensors may be read for as long as the next round runs. A part and its residual are replaced, never changed
    in place, and so is the memory of the optimizers here; that of a caller's own is copied.
    """
    own = type(server.optimizer) is AdaptiveOptimizer
    moments = {
        f"{kind}|{name}": tensor if own else tensor.clone()
        for name in server.parts.shapes[part]
        for kind, tensor in server.moments.get(name, {}).items()
    }
    kinds = {"": server.weights[part], "moments-": moments, "residual-": server.residual.get(part)}
    version = server.versions[part]
    return [
        (folder / f"{kind}{part}", folder / f"{kind}{part}@{version}.safetensors", tensors)
        for kind, tensors in kinds.items()
        if tensors
    ]


class CommitWriter:
    """Writes commits in a thread of its own, each after the one before it.

    Args:
        folder: the run's folder, for the sentence of an error.
        write: writes one.
    """

    def __init__(self, folder: Path, write: Callable[[Commit], None]) -> None:
        self.folder, self.write = folder, write
        self.thread = ThreadPoolExecutor(1, "state")
        self.pending: Future[None] | None = None

    def begin(self, commit: Commit) -> None:
        """Begin to write a commit, once the one before it is written.

        Raises:
            UserError: that one could not be written.
        """
        self.wait()
        self.pending = self.thread.submit(self.write, commit)

    def wait(self) -> None:
        """Wait until the commit that was begun is written.

        Raises:
            UserError: it could not be.
        """
        if self.pending is None:
            return
        try:
            self.pending.result()
        except OSError as error:
            raise UserError(
                f"{self.folder}: the state of its run cannot be written ({error.strerror or error}); --resume "
                "goes on from the last round that was"
            ) from error
        self.pending = None

    def close(self) -> None:
        """Let what was begun come to its end, however the run ends; an error of it is not raised any more."""
        self.thread.shutdown()
