"""The files of a run's folder, as they are read: JSON objects, lines of JSON, parts, and the stages in it."""

from __future__ import annotations

import gc
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from fedstrata.errors import UserError
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import CHOICES
from fedstrata.reports.parts import PartRecord, read_parts
from fedstrata.reports.record_types import PARTS, check_record
from fedstrata.wire.foreign import MOST_DIGITS, measure_json

DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
"""Makes all digits one, so that digits of what may be a number that no float holds are one text."""
LONG_NUMBER = b"0" * (MOST_DIGITS + 1)


def _content(path: Path) -> bytes:
    """What a file holds, without a byte order mark; nothing where there is none."""
    try:
        return path.read_bytes().removeprefix(BOM_UTF8) if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _parsed(text: bytes) -> Any:
    if LONG_NUMBER in text.translate(DIGITS):
        measure_json(text.decode(), len(text))
    return from_json(text, cache_strings="all")  # a ledger says each name a hundred thousand times


def _json(path: Path, empty: bytes) -> Any:
    try:
        return _parsed(_content(path) or empty)
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None


def record_object(path: Path, kind: TypeAdapter[Any]) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file.

    Raises:
        UserError: it cannot be read or holds something else than ``kind``.
    """
    content = _json(path, b"{}")
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold one JSON object, found {type(content).__name__}")
    if content:
        check_record(path, content, kind)
    return content


def record_parts(path: Path) -> Mapping[str, PartRecord]:
    """The parts in a file; none where there is no file.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    content = _json(path, b"[]")
    if not isinstance(content, list):
        raise UserError(f"{path}: must hold a list of parts, each with name, kind and depth")
    check_record(path, content, PARTS)
    return read_parts(content)


def record_lines(path: Path, kind: TypeAdapter[Any]) -> tuple[dict[str, Any], ...]:
    """The objects of a jsonl file; a last line that a kill cut short is dropped.

    Raises:
        UserError: another line is no JSON, or the lines are something else than ``kind``.
    """
    texts = _content(path).splitlines()
    lines: list[Any] = []
    with _without_collections():
        with suppress(ValueError):  # all at once, which is faster, unless one of them is damaged
            lines = _parsed(b"[%s]" % b",".join(texts))
        if len(lines) != len(texts):
            lines = _one_by_one(path, texts)
        check_record(path, lines, kind)
    return tuple(lines)


def stages_on_disk(folder: Path) -> list[str]:
    """Names of a run's stages that have begun, in the job's order.

    Times of files tell the order only where a run has not written it: a copy of the folder gives them any, and so
    does a clock that was set back.

    Raises:
        UserError: the file with the order is damaged.
    """
    found = read_toml(folder / CHOICES).get("stages") if (folder / CHOICES).exists() else None
    order = list(found) if isinstance(found, dict) else []
    begun = sorted((folder / "stages").glob("*/job.toml"), key=lambda path: (path.stat().st_mtime_ns, path))
    names = [path.parent.name for path in begun]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _one_by_one(path: Path, texts: Sequence[bytes]) -> list[Any]:
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(_parsed(text))
        except ValueError as error:
            if number < len(texts):
                raise UserError(f"{path}, line {number}: is not JSON: {error}") from None
    return lines


@contextmanager
def _without_collections() -> Iterator[None]:
    """Records have no cycles, but each of many thousand makes Python look for some in all that came before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
