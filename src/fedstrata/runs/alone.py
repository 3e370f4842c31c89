"""One thread of a process trains at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedstrata.errors import UserError

_training = threading.RLock()
"""Held by the thread that trains: a process has one number of threads, and one generator that dropout draws from;
two at once would come to other bits."""


@contextmanager
def alone(elsewhere: bool = False) -> Iterator[None]:
    """Refuse to train beside another thread of this process; ``elsewhere`` is a run that trains at sites.

    Raises:
        UserError: another thread is at a run.
    """
    if elsewhere:
        yield
        return
    if not _training.acquire(blocking=False):
        raise UserError(
            "another thread of this process is at a run, and both would draw from one random state; "
            "run one after the other, or each in a process of its own"
        )
    try:
        yield
    finally:
        _training.release()
