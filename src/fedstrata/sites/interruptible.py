"""The end of a program that would go on for ever: by Ctrl-C, a signal to terminate, or a closed terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 3.0
"""After which a program that goes on in spite of a signal is interrupted again."""


@contextmanager
def interruptible(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the block without a traceback; not SIGHUP under ``nohup``.

    Args:
        stop: set by the block when it is ending. Until then what the signal's handler raises is raised again, as
            Python discards it where a ``__del__`` runs, such as that of gRPC's calls.
    """

    def interrupt(number: int, frame: object) -> None:
        if number == signal.SIGALRM and stop.is_set():
            return
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGALRM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
