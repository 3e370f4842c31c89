"""Tensors on disk, written so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.files import write_views
from fedstrata.wire.tensor_file import pack

Note = Callable[[Path, Path, str], None]
"""Told of every file that is written: of what it is the newest (a folder, or a file without its version), its
path, and its checksum. Who is told sees to it that the file is on the disk before anything relies on it."""
HELD = 4
"""Rounds of a store that stay on disk: the one now running, the one before it, whose commit may still be being
written, and two more from which the run may have to go on if the newest commit is damaged."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], flushed: bool = True) -> str:
    """Write named tensors as a safetensors file, atomically; returns its checksum."""
    return write_views(path, pack(tensors, {"format": "pt"}).views(), flushed)


def read_tensors(path: Path) -> Tensors:
    """The named tensors of a safetensors file."""
    tensors: Tensors = safetensors.torch.load_file(path)
    return tensors


def unnoted(key: Path, path: Path, checksum: str) -> None:
    """Nobody keeps a record of what is written."""


class Store:
    """A folder of tensors by round, such as a client's personal parts on its own disk.

    The newest rounds before the one now running are never touched, so a round that is broken off and run again
    starts from the same tensors, even if the two rounds before it have to be run again as well.

    Args:
        folder: the folder.
        note: told of every file that is written.
    """

    def __init__(self, folder: Path, note: Note = unnoted) -> None:
        self.folder, self.note = folder, note

    def below(self, name: str) -> Store:
        """A store in a folder of this one."""
        return Store(self.folder / name, self.note)

    @property
    def residual(self) -> Store:
        """What the client's messages have left out so far (error feedback), added to the next."""
        return self.below("residual")

    @property
    def optimizer(self) -> Store:
        """The state of the client's optimizer, where it persists from round to round."""
        return self.below("optimizer")

    @property
    def late(self) -> Store:
        """The client's answer to a request of a round that has ended without it."""
        return self.below("late")

    @property
    def between(self) -> Store:
        """The client's own values of parts that it sends in a later round."""
        return self.below("between")

    def load(self, before: int) -> Tensors:
        """What was saved in the last round before ``before``; empty if nothing was."""
        path = self.newest(before)
        return read_tensors(path) if path else {}

    def newest(self, before: int | None = None) -> Path | None:
        """The file of the last round, or of the last before ``before``; None if nothing was saved."""
        rounds = [round for round in self._rounds() if before is None or round < before]
        return self.path(max(rounds)) if rounds else None

    def save(self, round: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save the tensors of ``round``; of the rounds before it the last three are kept."""
        self._write(self.folder, self.path(round), tensors)
        for old in sorted(r for r in self._rounds() if r < round)[: 1 - HELD]:
            self.path(old).unlink()

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a file that belongs to no round."""
        self._write(self.folder / name, self.folder / name, tensors)

    def path(self, round: int) -> Path:
        """The file of a round."""
        return self.folder / f"round-{round:06d}.safetensors"

    def _write(self, key: Path, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.note(key, path, write_tensors(path, tensors, flushed=self.note is unnoted))

    def _rounds(self) -> list[int]:
        return [round_of(path) for path in self.folder.glob("round-[0-9]*.safetensors")]


def round_of(path: Path) -> int:
    """The round of a store's file."""
    return int(path.stem.split("-")[1])
