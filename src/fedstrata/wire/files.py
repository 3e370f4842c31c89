"""Files written so that a crash leaves the old one or the new one, never half of either. No torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: whole and on the disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add records to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def link(source: str | Path, target: str | Path) -> None:
    """A second name for the same file where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
