"""The files of a run's folder, as they are read: JSON objects, lines of JSON, parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError
from fedstrata.reports.parts import PartRecord, read_parts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _json(path: Path, empty: str) -> Any:
    try:
        return json.loads(_text(path) or empty)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None


def record_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    content = _json(path, "{}")
    if isinstance(content, dict):
        return content
    raise UserError(f"{path}: must hold one JSON object, found {type(content).__name__}")


def record_parts(path: Path) -> Mapping[str, PartRecord]:
    """The parts in a file; none where there is no file.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        return read_parts(_json(path, "[]"))
    except (KeyError, TypeError):
        raise UserError(f"{path}: must hold a list of parts, each with name, kind and depth") from None


def record_lines(path: Path, keys: Set[str]) -> tuple[dict[str, Any], ...]:
    """The objects of a jsonl file, each with some keys; a last line that a kill cut short is dropped."""
    texts = path.read_bytes().splitlines() if path.exists() else []
    with suppress(ValueError):  # all at once, which is faster, unless one of them is damaged
        every = json.loads(b"[%s]" % b",".join(texts))
        if len(every) == len(texts) and all(isinstance(line, dict) and keys <= line.keys() for line in every):
            return tuple(every)
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            if number == len(texts):
                break
            raise UserError(f"{path}, line {number}: is not JSON: {error}") from None
        if not isinstance(lines[-1], dict) or not keys <= lines[-1].keys():
            raise UserError(
                f"{path}, line {number}: is no record of a run; expected {', '.join(sorted(keys))} in it"
            )
    return tuple(lines)
