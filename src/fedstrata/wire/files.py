"""Files written so that a crash leaves the old one or the new one, never half of either; checksums. No torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import xxhash

BLOCK = 1 << 24
"""Bytes that are read at once to be hashed."""
PRIVATE = 0o600
"""Mode of a file that is its owner's alone to read."""
SEAL = "checksum"
"""The key under which a sealed file carries its own checksum."""


def checksum(content: bytes) -> str:
    """XXH3, 128 bits, in hexadecimal: against accidents, several times as fast as the disk."""
    return xxhash.xxh3_128_hexdigest(content)


def checksum_of(path: Path, size: int | None = None) -> str | None:
    """The checksum of a file, or of its first ``size`` bytes; None if it is not there or shorter."""
    hashed, left = xxhash.xxh3_128(), size
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK if left is None else min(BLOCK, left)):
                hashed.update(block)
                left = None if left is None else left - len(block)
    except FileNotFoundError:
        return None if size != 0 else hashed.hexdigest()
    return None if left else hashed.hexdigest()


def endless_file(folder: Path) -> Path | None:
    """A pipe or a device in a folder, or a link to one: to read it may never end. None if there is none."""
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone since, or a link to nowhere
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return path
    return None


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically: whole and on the disk before it has its name."""
    write_views(path, (content,), flushed=True, mode=mode)


def write_views(path: Path, views: Iterable[bytes | memoryview], flushed: bool, mode: int = 0o666) -> str:
    """:func:`write_bytes` of one view after the other, none of which is copied; returns their checksum.

    Where it is not ``flushed``, see :func:`flush` for when it is on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part, hashed = path.with_name(f".{path.name}.part"), xxhash.xxh3_128()
    if part.is_symlink():  # in a folder that somebody else has made; what it leads to is not ours to write
        part.unlink()
    try:
        with named(path), open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            for view in views:
                file.write(view)
                hashed.update(view)
            if flushed:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk the status of the run needs its room
        raise
    os.replace(part, path)
    return hashed.hexdigest()


def write_sealed(path: Path, table: Mapping[str, Any], mode: int = 0o666) -> None:
    """Write a table as JSON with its own checksum, atomically."""
    write_bytes(path, json.dumps({**table, SEAL: _seal(table)}, indent=1, ensure_ascii=False).encode(), mode)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """A table as :func:`write_sealed` wrote it; None if it is not there, or not what was written."""
    try:
        table = json.loads(path.read_bytes())
        found = table.pop(SEAL)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return table if found == _seal(table) else None


def _seal(table: Mapping[str, Any]) -> str:
    return checksum(json.dumps(table, ensure_ascii=False).encode())


def encode_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Records as JSON lines."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def append_bytes(path: Path, content: bytes) -> None:
    """Add to a file, all or nothing; see :func:`flush` for when it is on the disk."""
    with named(path), path.open("ab", buffering=0) as file:  # a buffer would write its rest after the cut below
        before, left = file.tell(), memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(before)
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an error of the system the file's name, which it lacks where a write fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:  # without a number it has words of its own
            error.filename = str(path)
        raise


def reserve(file: IO[bytes], path: Path, size: int) -> None:
    """Take the room of a file that is then written through memory, where a full disk ends the process at once.

    Args:
        file: it, open and empty.
        path: what an error calls it.
        size: bytes.

    Raises:
        OSError: there is no room.
    """
    with named(path):
        os.truncate(file.fileno(), size)
        try:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that reserves nothing
                os.truncate(file.fileno(), 0)
                raise


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add records to a JSON-lines file."""
    append_bytes(path, encode_lines(lines))


def flush(path: Path) -> None:
    """Wait until a file, or what was added to it, is on the disk; one that is not there any more needs nothing."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file but for a last one that is incomplete; none where there is no file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    return decode_lines(content[: content.rfind(b"\n") + 1])


def decode_lines(content: bytes) -> list[dict[str, Any]]:
    """The records of JSON lines; read as one array they share their keys, and take half the memory and time."""
    lines: list[dict[str, Any]] = json.loads(b"[" + b",".join(content.splitlines()) + b"]")
    return lines


def locked(path: Path) -> bool:
    """Whether a process that lives holds a lock file locked; not where this process may not open it."""
    from filelock import FileLock, Timeout  # here, as most commands hold no lock

    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def link(source: str | Path, target: str | Path) -> None:
    """A second name for the same file where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_folder(source: Path, target: Path, copy: Callable[[str, str], object] = link) -> None:
    """Make a folder anew as a copy of another one, each file by ``copy``; whole or not at all.

    Raises:
        OSError: the first one, as of a full disk, with the file that could not be made; shutil's raises a list.
    """
    found = [source, *sorted(source.rglob("*"))]
    try:
        for path in found:
            place = target / path.relative_to(source)
            if path.is_dir():
                place.mkdir(parents=True)
            else:
                copy(str(path), str(place))
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)  # on a full disk the status of the run needs its room
        error.filename, error.filename2 = str(place), None
        raise


def clear(folder: Path, names: Collection[str]) -> None:
    """Delete the files below a folder whose names match one of the patterns, and the folders that this empties.

    Whatever else somebody has put there stays; so does what a link in the folder's place leads to.
    """
    if folder.is_symlink():
        return
    found = [path for path in folder.rglob("*") if any(fnmatch(path.name, name) for name in names)]
    for path in found:
        if path.is_file() or path.is_symlink():
            path.unlink()
    inside = {above for path in found for above in path.parents if above == folder or folder in above.parents}
    for emptied in sorted({*inside, folder}, reverse=True):
        with suppress(OSError):
            emptied.rmdir()


def replace_folder(new: Path, folder: Path, own: Collection[str]) -> None:
    """Put a new folder in the place of another; files that somebody else has put there are moved into the new one.

    Args:
        new: the new folder.
        folder: the place.
        own: patterns of the names of files that are replaced, even by none.
    """
    for path in list(folder.rglob("*")):
        target = new / path.relative_to(folder)
        moves = path.is_symlink() or not path.is_dir()  # a link goes along as one, wherever it leads
        if moves and not os.path.lexists(target) and not any(fnmatch(path.name, name) for name in own):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(new, folder)
