"""Files on a disk that takes no more: nothing half written stays, and the error names the file."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedstrata.wire.files import append_bytes, append_lines, read_lines, write_bytes


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Inside, no file can get longer than ``size`` bytes: a write is taken in part, then refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"round": 0}])
    before = path.read_bytes()
    with full_after(len(before) + 5), pytest.raises(OSError, match="File too large") as found:
        append_bytes(path, b"x" * 100_000)
    assert (found.value.errno, found.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    append_lines(path, [{"round": 1}])
    assert read_lines(path) == [{"round": 0}, {"round": 1}]


def test_a_file_that_does_not_fit_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with full_after(10), pytest.raises(OSError, match="File too large") as found:
        write_bytes(path, b"x" * 100_000)
    assert found.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_last_line_that_a_kill_cut_short_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"round": 0}\n{"round"')
    assert read_lines(path) == [{"round": 0}]
