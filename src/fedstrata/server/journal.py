"""Which files of a state are the newest of their kind, each with its checksum: a journal that is only added to.

A line per file that was written, so that a commit adds what has changed and not what there is. How far the journal
of a run goes is said by the manifest of a commit; a site keeps one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedstrata.wire.files import checksum_of


class Journal:
    """What is known of the files below a folder.

    Attributes:
        folder: the folder.
        files: key -> (file, checksum) of the newest file of that key, as paths below the folder.
        clients: client -> the versions of the model's parts that it has, in the model's order.
        lines: what has happened since :meth:`take`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, tuple[str, str]] = {}
        self.clients: dict[str, list[int]] = {}
        self.lines: list[Mapping[str, Any]] = []

    def note(self, key: Path, path: Path, checksum: str) -> None:
        """A file was written; it is the newest of ``key``, a folder or a file without its version."""
        self._add({"key": self._name(key), "file": self._name(path), "checksum": checksum})

    def note_clients(self, versions: Mapping[str, list[int]]) -> None:
        """Note those clients that now have other versions of the model's parts than before."""
        for client, own in versions.items():
            if self.clients.get(client) != own:
                self._add({"client": client, "versions": own})

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over what an earlier process has noted."""
        for line in lines:
            self._take_over(line)

    def take(self) -> list[Mapping[str, Any]]:
        """The lines to be added to the file of the journal."""
        lines, self.lines = self.lines, []
        return lines

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

    def _add(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self._take_over(line)

    def _take_over(self, line: Mapping[str, Any]) -> None:
        if "client" in line:
            self.clients[line["client"]] = list(line["versions"])
        else:
            self.files[line["key"]] = line["file"], line["checksum"]
