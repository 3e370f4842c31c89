"""What a run records as it goes: JSON lines on disk, or in memory where nothing is trained."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import xxhash

from fedstrata.errors import UserError
from fedstrata.wire.files import append_bytes, checksum_of, decode_lines, encode_lines, read_lines

Line = Mapping[str, Any]
Mark = tuple[int, str]
"""How long a file is, in bytes, and the checksum of so much of it."""


class Records(Protocol):
    """Lines by the name of their file: ``rounds``, ``ledger``, ``missing``."""

    def append(self, name: str, lines: Iterable[Line]) -> None:
        """Add lines."""

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All lines so far."""


class FileRecords:
    """``NAME.jsonl`` in a run's folder, with a running checksum of each that is part of every commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        self.hashes: dict[str, xxhash.xxh3_128] = {}
        self.unflushed: set[str] = set()

    def append(self, name: str, lines: Iterable[Line]) -> None:
        """See :class:`Records`."""
        content = encode_lines(lines)
        append_bytes(self.path(name), content)
        self._count(name, content)
        self.unflushed.add(name)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """See :class:`Records`."""
        return read_lines(self.path(name))

    def path(self, name: str) -> Path:
        """The file of a name."""
        return self.folder / f"{name}.jsonl"

    def marks(self) -> dict[str, Mark]:
        """How far each file goes."""
        return {name: (size, self.hashes[name].hexdigest()) for name, size in self.sizes.items()}

    def take_unflushed(self) -> list[Path]:
        """The files that have been added to since this was last asked, which may not be on the disk yet."""
        paths = [self.path(name) for name in sorted(self.unflushed)]
        self.unflushed.clear()
        return paths

    def damaged(self, marks: Mapping[str, Mark]) -> Path | None:
        """The first file that does not begin with what was there when it was marked."""
        wrong = (name for name, (size, found) in marks.items() if checksum_of(self.path(name), size) != found)
        return next(map(self.path, wrong), None)

    def lines_to(self, name: str, marks: Mapping[str, Mark]) -> list[dict[str, Any]]:
        """The lines up to where the file was marked."""
        if name not in marks:
            return []
        with self.path(name).open("rb") as file:
            return decode_lines(file.read(marks[name][0]))

    def lines_after(self, name: str, marks: Mapping[str, Mark]) -> list[dict[str, Any]]:
        """The lines from where the file was marked; one that did not get to the disk as a whole is none."""
        path = self.path(name)
        content = path.read_bytes() if path.exists() else b""
        found = []
        for line in content[marks[name][0] if name in marks else 0 :].splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def cut(self, marks: Mapping[str, Mark], names: Sequence[str]) -> None:
        """Cut the files of these names back to where they were marked, and go on from there.

        Raises:
            UserError: one is a link: what it leads to, in a folder from somebody else, is no record.
        """
        for name in names:
            path = self.path(name)
            if path.is_symlink():
                raise UserError(f"{path}: is a link, and a run that goes on adds to it; expected a file")
            if name in marks:
                path.touch()  # whoever copied the folder may have left out a file without lines
                os.truncate(path, marks[name][0])
                self._count(name, path.read_bytes())
            else:
                path.unlink(missing_ok=True)

    def _count(self, name: str, content: bytes) -> None:
        self.sizes[name] = self.sizes.get(name, 0) + len(content)
        self.hashes.setdefault(name, xxhash.xxh3_128()).update(content)


class MemoryRecords:
    """Lists."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[dict[str, Any]]] = {}

    def append(self, name: str, lines: Iterable[Line]) -> None:
        """See :class:`Records`."""
        self.by_name.setdefault(name, []).extend(map(dict, lines))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """See :class:`Records`."""
        return self.by_name.get(name, [])
