"""Which files of a state are the newest of their kind, each with its checksum: a journal that is only added to.

A line per file that was written, so that a commit adds what has changed and not what there is. How far the journal
of a run goes is said by the manifest of a commit; a site keeps one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedstrata.wire.files import checksum_of

Versions = tuple[int, ...]
"""The version of every part of the model, in the model's order."""


class Journal:
    """What is known of the files below a folder.

    Attributes:
        folder: the folder.
        files: key -> (file, checksum) of the newest file of that key, as paths below the folder.
        clients: of what was read: client -> the versions of the model's parts that it has, in the model's order.
        lines: what has happened since :meth:`take`.
        unflushed: files written since :meth:`take_unflushed`, which may not be on the disk yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, tuple[str, str]] = {}
        self.clients: dict[str, Versions] = {}
        self.lines: list[Mapping[str, Any]] = []
        self.unflushed: list[Path] = []

    def note(self, key: Path, path: Path, checksum: str) -> None:
        """A file was written; it is the newest of ``key``, a folder or a file without its version."""
        line = self.line(key, path, checksum)
        self.lines.append(line)
        self.unflushed.append(path)
        self._take_over(line)

    def line(self, key: Path, path: Path, checksum: str) -> dict[str, str]:
        """What is noted of a file."""
        return {"key": self._name(key), "file": self._name(path), "checksum": checksum}

    def note_clients(self, versions: Mapping[str, Versions]) -> None:
        """Note clients that now have other versions of the model's parts: a line for all that have the same."""
        alike: defaultdict[Versions, list[str]] = defaultdict(list)
        for client, own in versions.items():
            alike[own].append(client)
        self.lines += [{"clients": clients, "versions": own} for own, clients in alike.items()]

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over what an earlier process has noted."""
        for line in lines:
            self._take_over(line)

    def take(self) -> list[Mapping[str, Any]]:
        """The lines to be added to the file of the journal."""
        lines, self.lines = self.lines, []
        return lines

    def take_unflushed(self) -> list[Path]:
        """The files that may not be on the disk yet."""
        paths, self.unflushed = self.unflushed, []
        return paths

    def damaged(self) -> Path | None:
        """The first of the newest files that is not there as it was written."""
        wrong = (self.folder / file for file, found in self.files.values() if self._checksum(file) != found)
        return next(wrong, None)

    def path(self, key: str) -> Path | None:
        """The newest file of a key; None if there never was one."""
        return self.folder / self.files[key][0] if key in self.files else None

    def _checksum(self, file: str) -> str | None:
        return checksum_of(self.folder / file)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _take_over(self, line: Mapping[str, Any]) -> None:
        if "versions" in line:  # of one client in journals of earlier versions
            self.clients |= dict.fromkeys(line.get("clients") or [line["client"]], tuple(line["versions"]))
        else:
            if (path := Path(line["file"])).is_absolute() or ".." in path.parts:
                raise ValueError(f"{path} is not below {self.folder}")
            self.files[line["key"]] = line["file"], line["checksum"]
