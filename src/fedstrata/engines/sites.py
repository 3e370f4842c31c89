"""The engine over sites: a request goes out as a message; a site has until the deadline, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedstrata.core import state
from fedstrata.core.client import Missing, Reply, Request
from fedstrata.events import Event, Waiting
from fedstrata.wire.messages import (
    Envelope,
    FarewellHeader,
    RefusalHeader,
    ReplyHeader,
    WelcomeHeader,
    of_request,
    reply_in,
    seal,
    unseal,
)
from fedstrata.wire.tensors import WireError

POLL = 0.1
"""Seconds between two looks for answers."""
PAUSE = 5.0
"""Seconds before a message that was lost is sent again."""

SILENCE = 5.0
"""Seconds after which it is told who is not there."""

Presence = tuple[int, str]
"""A site that is there: its number, and since when."""
Talk = Generator[bytes, Envelope, Reply | WelcomeHeader]
"""What is said to a site, message by message; its answers are sent in."""


class Courier(Protocol):
    """Brings messages to sites; see :class:`fedstrata.engines.flower.Courier`."""

    def online(self) -> dict[str, Presence]:
        """The sites that are there now."""

    def send(self, to: Presence, message: bytes, seconds: float) -> str:
        """Send a message that is worth something for so long; returns its number."""

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """What has come in answer to these messages by now; None in place of an answer that will not come."""


class Crossing(Protocol):
    """Where the clients' batches pass through the server's layers; see :mod:`fedstrata.engines.stream`."""

    def expect(self, requests: Sequence[Request], tokens: Mapping[str, str]) -> None:
        """These clients' batches come next, in this order; by the tokens they are known."""

    def drop(self, client: str) -> None:
        """A client is given up."""


@dataclass
class Sites:
    """One stage's sites.

    Attributes:
        run: the stage's run; every message names it.
        names: the sites' names, in canonical order.
        courier: brings the messages.
        check: raises WireError for a reply that does not answer its request.
        hello: makes a site's first message.
        start: makes the message with the start model.
        deadline: seconds.
        folder: the run's output folder, where every message's bytes are recorded.
        tell: receives events.
        crossing: where batches pass through the server's layers; None where there are none.
        tokens: site -> what it is known by there.
    """

    run: str
    names: Sequence[str]
    courier: Courier
    check: Callable[[Request, Reply], None]
    hello: Callable[[str], bytes]
    start: Callable[[], bytes]
    deadline: float
    folder: Path
    tell: Callable[[Event], None]
    crossing: Crossing | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    welcome: dict[str, WelcomeHeader] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)

    def clients(self) -> Sequence[str]:
        """The sites' names."""
        return self.names

    def gather(self) -> list[Missing]:
        """Greet all sites and hand them the start model; those that do not take part, and why."""
        return [answer for answer in self._side_by_side({name: self._greet(name) for name in self.names}, -1)
                if isinstance(answer, Missing)]  # fmt: skip

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | Missing]:
        """One answer per request; a site that comes late to the run is greeted first."""
        made = list(requests)
        if self.crossing and made[0].plan.server and made[0].phase != "receive":
            self.crossing.expect(made, self.tokens)
        for answer in self._side_by_side({r.client: self._ask(r) for r in made}, made[0].round):
            if isinstance(answer, Missing) and self.crossing:
                self.crossing.drop(answer.client)
            yield answer

    def farewell(self, save: bool) -> None:
        """Tell every site that the stage is over; those who are not there learn it from the next."""
        message = seal(self.run, FarewellHeader(save=save))
        self.away |= set(self.names)
        list(self._side_by_side({name: self._part(message) for name in self.welcome}, -1))

    def _greet(self, name: str) -> Talk:
        answer = (yield self.hello(name)).header
        if isinstance(answer, WelcomeHeader) and not answer.holds:
            answer = (yield self.start()).header
        if not isinstance(answer, WelcomeHeader):
            raise WireError("does not greet back")
        self.welcome[name] = answer
        return answer

    def _ask(self, request: Request) -> Talk:
        if request.client not in self.welcome:
            yield from self._greet(request.client)
        answer = yield of_request(self.run, request)
        if not isinstance(answer.header, ReplyHeader):
            raise WireError("does not reply")
        reply = reply_in(answer)
        if reply.client != request.client:
            raise WireError(f"answers as {reply.client!r}")
        self.check(request, reply)
        return reply

    def _part(self, message: bytes) -> Talk:
        answer = (yield message).header
        assert isinstance(answer, WelcomeHeader)
        return answer

    def _side_by_side(self, talks: Mapping[str, Talk], round: int) -> Iterator[Reply | Missing]:
        """Talk to several sites at once; each ends in a reply, or is missing. A welcome ends in nothing."""
        began = time.monotonic()
        until = began + self.deadline
        waiting: dict[str, tuple[float, bytes | None]] = {}  # site -> from when on to send what, once it is there
        under: dict[
            str, tuple[str, Presence, float, bytes]
        ] = {}  # number -> site, its presence, when, the message
        left = set(talks)
        for name in talks:
            if name in self.refused:
                left.discard(name)
                yield Missing(name, self.refused[name])
            else:
                waiting[name] = 0.0, None
        told: set[str] = set()
        while left:
            now, there = time.monotonic(), self.courier.online()
            for number, (name, presence, _, message) in list(under.items()):
                if name in there and there[name] != presence:  # it has started again and knows nothing of this
                    del under[number]
                    waiting[name] = now, message
            for name, (since, due) in list(waiting.items()):
                if name in there and now >= since:
                    message = next(talks[name]) if due is None else due
                    number = self.courier.send(there[name], message, until - now)
                    self._record(round, name, "down", message)
                    under[number] = name, there[name], now, message
                    del waiting[name]
            for number, answer in self.courier.receive(under):
                name, _, sent, message = under.pop(number)
                if answer is None:
                    waiting[name] = now + PAUSE, message
                    continue
                self._record(round, name, "up", answer, time.monotonic() - sent)
                try:
                    waiting[name] = 0.0, talks[name].send(self._open(name, answer))
                except StopIteration as end:
                    left.discard(name)
                    self.away.discard(name)
                    if isinstance(end.value, Reply):
                        yield end.value
                except WireError as error:
                    left.discard(name)
                    yield Missing(name, str(error))
            late = {name for name in left if name not in there and name not in told}
            if late - self.away and now > began + SILENCE:
                told |= late
                self.tell(Waiting(tuple(sorted(late)), until - now))
            busy = {name for name, *_ in under.values()} | (left - self.away)
            if left and (now > until or not busy):
                for name in [name for name in talks if name in left]:
                    self.away.add(name)
                    left.discard(name)
                    yield Missing(name, "is not connected" if name not in there else "did not answer in time")
            if left:
                time.sleep(POLL)

    def _open(self, name: str, answer: bytes) -> Envelope:
        envelope = unseal(answer, "welcome", "reply", "refusal")
        header = envelope.header
        if envelope.run != self.run:
            raise WireError("answers for another run")
        if isinstance(header, RefusalHeader):
            if header.final:
                self.refused[name] = header.reason
            raise WireError(header.reason)
        return envelope

    def _record(self, round: int, name: str, way: str, message: bytes, seconds: float | None = None) -> None:
        record = {"round": round, "client": name, "direction": way, "bytes": len(message), "seconds": seconds}
        state.append(self.folder / "transport.jsonl", [record])
