"""The hidden states that were last sent of each example, as both ends of a session hold them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO

import torch

from fedstrata.wire.codec import WireError
from fedstrata.wire.files import named


class RowCache:
    """States of examples in a file without a name, which ends with this object, however the process ends.

    Args:
        folder: where there is room.
        width: of the states.
        limit: most bytes; from the first example that does not fit no other is kept, and those that are stay. So
            of two caches that are given the same, the one with more room keeps all that the other does.
    """

    def __init__(self, folder: Path, width: int, limit: int) -> None:
        self.folder, self.width, self.limit = folder, width, limit
        self.file: BinaryIO | None = None
        self.places: dict[int, tuple[int, int]] = {}
        """Example -> where it begins, in bytes, and its tokens."""
        self.used = 0
        self.full = False

    def of(self, examples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of some examples, ``[n, H]`` fp32, 0 where there are none, and which tokens have some.

        Raises:
            WireError: an example is kept with another number of tokens.
        """
        rows, there = [], []
        for example, tokens in zip(examples.tolist(), lengths.tolist(), strict=True):
            start, kept = self.places.get(example, (0, 0))
            if kept not in (0, tokens):
                raise WireError(f"examples: {example} had {kept} tokens and now has {tokens}")
            rows.append(self._read(start, tokens) if kept else torch.zeros(tokens, self.width))
            there.append(torch.full((tokens,), bool(kept)))
        return torch.cat(rows), torch.cat(there)

    def put(self, examples: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the states ``[n, H]`` fp32 of some examples, as far as there is room."""
        for example, own in zip(examples.tolist(), torch.split(rows, lengths.tolist()), strict=True):
            size = 4 * own.numel()
            if example not in self.places:
                self.full = self.full or self.used + size > self.limit
                if self.full:
                    continue
                self.places[example] = self.used, len(own)
                self.used += size
            self._write(self.places[example][0], own)

    def close(self) -> None:
        """Forget everything."""
        self.places.clear()
        self.used = 0
        if self.file is not None:
            self.file.close()
            self.file = None

    def __del__(self) -> None:
        self.close()

    def _read(self, start: int, tokens: int) -> torch.Tensor:
        assert self.file is not None
        self.file.seek(start)
        content = bytearray(self.file.read(4 * tokens * self.width))
        return torch.frombuffer(content, dtype=torch.float32).view(tokens, self.width)

    def _write(self, start: int, rows: torch.Tensor) -> None:
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (until close)
        with named(self.folder):
            self.file.seek(start)
            self.file.write(rows.contiguous().numpy().tobytes())


def needed(tokens: int, width: int) -> int:
    """Bytes that the states of so many tokens take in a cache."""
    return 4 * tokens * width


def room_words(cached: int, room: int) -> str:
    """What a cache takes of each end's disk, in words, where all states would take ``cached`` bytes."""
    if cached <= room:
        return f"both ends keep up to {cached / 1e6:,.4g} MB of hidden states on their disks during a round"
    return (
        f"both ends keep up to {room / 1e6:,.4g} of {cached / 1e6:,.4g} MB of hidden states on their disks during "
        "a round ([train] feature_cache_gb); texts that find no room are sent whole every time"
    )
