"""What a run records as it goes: JSON lines on disk, or in memory where nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedstrata.wire.files import append_lines, read_lines

Line = Mapping[str, Any]


class Records(Protocol):
    """Lines by the name of their file: ``rounds``, ``ledger``, ``missing``."""

    def append(self, name: str, lines: Iterable[Line]) -> None:
        """Add lines."""

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All lines so far."""


class FileRecords:
    """``NAME.jsonl`` in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, name: str, lines: Iterable[Line]) -> None:
        """See :class:`Records`."""
        append_lines(self.folder / f"{name}.jsonl", lines)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """See :class:`Records`."""
        return read_lines(self.folder / f"{name}.jsonl")


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
