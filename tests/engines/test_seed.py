"""What a worker is made of, brought to another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fedstrata.engines.seed import LARGE, NotPortableError, Seed, dump_seed, load_seed


def brought(*arrays: np.ndarray[Any, Any]) -> tuple[list[np.ndarray[Any, Any]], int]:
    """The arrays as a worker has them, and how many were copied."""
    content, copied = dump_seed(cast(Seed, list(arrays)))
    return cast(list[np.ndarray[Any, Any]], load_seed(content, copied)), len(copied)


@pytest.fixture
def mapped(tmp_path: Path) -> np.ndarray[Any, Any]:
    """An array that is mapped from a file."""
    np.save(tmp_path / "a.npy", np.arange(LARGE, dtype=np.int32))
    return np.load(tmp_path / "a.npy", mmap_mode="r")  # type: ignore[no-any-return]


def test_a_mapped_array_is_mapped_again(mapped: np.ndarray[Any, Any]) -> None:
    [found], copied = brought(mapped)
    assert isinstance(found, np.memmap)
    assert copied == 0
    np.testing.assert_array_equal(found, mapped)


def test_arrays_made_from_a_mapped_one_are_copied(mapped: np.ndarray[Any, Any]) -> None:
    """They are of its class, but stand in no file."""
    made = [np.diff(mapped), mapped + 1, mapped[5:], np.sort(mapped)]
    assert any(isinstance(one, np.memmap) for one in made)
    found, copied = brought(*made)
    assert copied == len(made)
    for one, other in zip(found, made, strict=True):
        np.testing.assert_array_equal(one, other)


class Wrapped:
    """As a task of one's own may be: all that it lacks is the plain one's."""

    def __init__(self) -> None:
        self.plain = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def test_what_can_be_written_and_not_be_read_is_refused_before_a_worker_has_it() -> None:
    """A copy asks for its plain one before it has any."""
    with pytest.raises(NotPortableError, match="reading it there ends in RecursionError: maximum recursion depth"):
        dump_seed(cast(Seed, [Wrapped()]))
