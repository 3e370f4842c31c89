"""The end of a round: its state is committed, then told, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fedstrata.events import Event, RoundEnded
from fedstrata.server.server import Server
from fedstrata.server.state import RunState


def committing(
    state: RunState, server: Server, tell: Callable[[Event], None], began: float, rounds: tuple[int, int]
) -> Callable[[Sequence[str], int], None]:
    """What commits a round: the parts that changed, rounds done.

    Args:
        state: the run's on the disk.
        server: holds the weights.
        tell: receives events.
        began: monotonic time at which the stage would have begun without interruptions.
        rounds: those done before, and all.
    """
    before, last = rounds
    first = time.monotonic()

    def commit(changed: Sequence[str], finished: int) -> None:
        state.commit(server, changed, finished, time.monotonic() - began)
        each = (time.monotonic() - first) / (finished - before)
        tell(RoundEnded(finished - 1, each * (last - finished)))

    return commit
