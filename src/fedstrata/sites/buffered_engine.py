"""The engine over sites in asynchronous rounds: a site that has not answered yet goes on, and so does the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedstrata.plan.arrivals import Arrival
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.sites.conversation import Awaiting, PendingReply, Presence
from fedstrata.sites.engine import POLL_SECONDS, REPORT_SECONDS, RemoteEngine


@dataclass
class BufferedRemoteEngine(RemoteEngine):
    """One stage's sites in asynchronous rounds; see :class:`fedstrata.plan.messages.BufferedEngine`.

    Attributes:
        asked: site -> round in which it was asked what has not been taken yet.
        pending: site -> its conversation, which may last for many rounds.
        arrived: answers in the order of their arrival that are in no round yet.
        taken: the answers of the round.
    """

    asked: dict[str, int] = field(default_factory=dict, init=False)
    pending: dict[str, PendingReply] = field(default_factory=dict, init=False)
    arrived: list[Reply | NoReply] = field(default_factory=list, init=False)
    taken: list[Reply | NoReply] = field(default_factory=list, init=False)

    def arrive(self, round: int, requests: Sequence[Request], count: int) -> Sequence[Arrival]:
        """See :class:`fedstrata.plan.messages.BufferedEngine`."""
        self.ask_again(requests)
        self.taken, start = [], time.monotonic()
        reported: set[str] = set()
        awaiting = Awaiting(round, self.on_event)
        while True:
            awaiting(self.pending, max((reply.until for reply in self.pending.values()), default=start))
            now, online = time.monotonic(), self.transport.online()
            self._send(round, self.pending, online)
            self.arrived += self._receive(round, self.pending, now)
            self._expire(now, online)
            if self._take(count) or not self.pending:
                break
            if now > start + REPORT_SECONDS:
                left = min(reply.until for reply in self.pending.values()) - now
                self._report_offline(self.pending.keys() - online.keys(), reported, left)
            self.transport.wait(min(1.0, max(POLL_SECONDS, (now - start) / 50)))
        return [
            Arrival(round, answer.client, self.asked.pop(answer.client), isinstance(answer, NoReply))
            for answer in self.taken
        ]

    def answers(self) -> Iterator[Reply | NoReply]:
        """See :class:`fedstrata.plan.messages.BufferedEngine`."""
        by_client = {answer.client: answer for answer in self.taken}
        self.taken = []
        for name in self.run.names:
            if name in by_client:
                yield by_client.pop(name)

    def give_up(self, client: str) -> None:
        """See :class:`fedstrata.plan.messages.BufferedEngine`; an answer that comes all the same is not read."""
        self.asked.pop(client, None)
        self.pending.pop(client, None)
        self.arrived = [answer for answer in self.arrived if answer.client != client]

    def ask_again(self, requests: Iterable[Request]) -> None:
        """See :class:`fedstrata.plan.messages.BufferedEngine`: a site keeps its answers, and sends them again."""
        refusals = self.refusals.now(self.transport.online)
        for request in requests:
            name = request.client
            self.asked[name] = request.round
            if name in refusals:
                self.arrived.append(NoReply(name, refusals[name]))
            else:
                conversation = self._request(request)
                until = time.monotonic() + self.deadline
                self.pending[name] = PendingReply(conversation, next(conversation), until)

    def _take(self, count: int) -> bool:
        """Take what has arrived into the round, up to so many answers; whether there are as many."""
        answers = sum(isinstance(answer, Reply) for answer in self.taken)
        while self.arrived and answers < count:
            answers += isinstance(self.arrived[0], Reply)
            self.taken.append(self.arrived.pop(0))
        return answers >= count

    def _expire(self, now: float, online: Mapping[str, Presence]) -> None:
        """Give up sites whose time is over, and, once nobody else is left, those that missed a deadline before."""
        waits = any(reply.message_id or name not in self.absent for name, reply in self.pending.items())
        for name in [name for name, reply in self.pending.items() if now > reply.until or not waits]:
            del self.pending[name]
            self.absent.add(name)
            reason = "did not answer in time" if name in online else "is not connected"
            self.arrived.append(NoReply(name, reason))
