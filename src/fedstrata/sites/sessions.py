"""Sessions of split learning at the server, and whose turn it is."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fedstrata.plan.messages import Request


class SessionCanceled(Exception):
    """The session was canceled by the server."""


@dataclass(eq=False)
class Session:
    """A session that is expected or open.

    Attributes:
        request: what the client has been asked.
        queue: the sessions that take turns with this one, in order, itself among them.
        stream: the server's end of the stream, once the client has connected.
        steps: of the client's round, once it has begun.
        taken: steps taken.
        mid_batch: a batch has gone forward and not yet backward.
        waiting_since: monotonic time since which the server has waited for the client, at first for it to connect;
            inf when it is the server's move.
        late: the client has not connected in time, so that its turns are not waited for before it does.
        missed: turns that it does not catch up with, as it was late.
        ended: the client has ended the session.
        closed: the session is over or canceled.
        released: set when nothing of the session uses the layers any more.
    """

    request: Request
    queue: list[Session] = field(default_factory=list)
    stream: Any = None
    steps: int | None = None
    taken: int = 0
    mid_batch: bool = False
    waiting_since: float = field(default_factory=time.monotonic)
    late: bool = False
    missed: int = 0
    ended: bool = False
    closed: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def trains(self) -> bool:
        """The client trains; else it is scored."""
        return self.request.phase == "train"

    def expected(self) -> tuple[str, ...]:
        """The kinds that the client's next message may be of."""
        if not self.trains:
            return "forward", "end"
        if self.steps is None:
            return ("begin",)
        if self.mid_batch:
            return ("backward",)
        return ("forward",) if self.taken < self.steps else ("end",)

    @property
    def turn(self) -> int:
        """The number of its next turn."""
        return self.missed + self.taken

    def has_turn(self) -> bool:
        """Round-robin: this client has had the fewest turns of those not done, ties broken by client order."""
        there = [s for s in self.queue if not s.closed and (s.stream or not s.late)]
        active = [s for s in there if s.steps is None or s.taken < s.steps]
        return min(active, key=lambda session: session.turn) is self

    def join(self) -> None:
        """The client has connected; where it is late, others do not wait until it has caught up."""
        if self.late:
            self.missed = max(session.turn for session in self.queue)
