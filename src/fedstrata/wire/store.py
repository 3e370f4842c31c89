"""Tensors on disk, written so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.files import write_bytes


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors as a safetensors file, atomically."""
    content = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()}, {"format": "pt"})
    write_bytes(path, content)


def read_tensors(path: Path) -> Tensors:
    """The named tensors of a safetensors file."""
    tensors: Tensors = safetensors.torch.load_file(path)
    return tensors


class Store:
    """One client's own disk: its personal parts, by round.

    The newest round before the one now running is never touched, so a round that is broken off and run again
    starts from the same tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def residual(self) -> Store:
        """What the client's messages have left out so far (error feedback), added to the next."""
        return Store(self.folder / "residual")

    @property
    def optimizer(self) -> Store:
        """The state of the client's optimizer, where it persists from round to round."""
        return Store(self.folder / "optimizer")

    def load(self, before: int) -> Tensors:
        """What was saved in the last round before ``before``; empty if nothing was."""
        path = self.newest(before)
        return read_tensors(path) if path else {}

    def newest(self, before: int | None = None) -> Path | None:
        """The file of the last round, or of the last before ``before``; None if nothing was saved."""
        rounds = [round for round in self._rounds() if before is None or round < before]
        return self._path(max(rounds)) if rounds else None

    def save(self, round: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save the tensors of ``round``; of the rounds before it only the last is kept."""
        write_tensors(self._path(round), tensors)
        for old in sorted(r for r in self._rounds() if r < round)[:-1]:
            self._path(old).unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def _rounds(self) -> list[int]:
        return [int(path.stem.split("-")[1]) for path in self.folder.glob("round-*.safetensors")]
