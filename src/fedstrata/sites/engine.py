"""The engine over sites: a request goes out as a message; a site has until the deadline, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from fedstrata.events import Event, Waiting
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.server import state
from fedstrata.sites.messages import (
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
from fedstrata.wire.codec import WireError

POLL = 0.1
"""Seconds between two looks for answers, at first; later it is a fiftieth of the time that has passed."""
PAUSE = 5.0
"""Seconds before a message that was lost is sent again."""

LAST = 60.0
"""Seconds for the last message of a stage."""
SILENCE = 5.0
"""Seconds after which it is told who is not there."""

Presence = tuple[int, str]
"""A site that is there: its number, and since when."""
Conversation = Generator[Callable[[], bytes], Envelope, Reply | WelcomeHeader]
"""What is said to a site, message by message, each made when it is sent; its answers are sent in."""


class Transport(Protocol):
    """Brings messages to sites; see :class:`fedstrata.sites.flower.Transport`."""

    def online(self) -> dict[str, Presence]:
        """The sites that are there now."""

    def send(self, to: Presence, message: bytes, seconds: float) -> str:
        """Send a message that is worth something for so long; returns its number, empty if it cannot be sent."""

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """What has come in answer to these messages by now; None in place of an answer that will not come."""


@dataclass
class PendingReply:
    """A site that is being talked to.

    Attributes:
        talk: what is said to it.
        make: makes the next message, again where it was lost.
        since: clock time from when on it may be sent.
        number: of the message under way; empty while there is none.
        presence: of the site when it was sent,
        sent: and the clock time.
    """

    talk: Conversation
    make: Callable[[], bytes]
    since: float = 0.0
    number: str = ""
    presence: Presence | None = None
    sent: float = 0.0


class ActivationServer(Protocol):
    """Where the clients' batches pass through the server's layers; see :mod:`fedstrata.sites.stream`."""

    def expect(self, requests: Sequence[Request], tokens: Mapping[str, str]) -> None:
        """These clients' batches come next, in this order; by the tokens they are known."""

    def drop(self, client: str) -> None:
        """A client is given up."""


@dataclass
class RemoteEngine:
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
        welcome: what the sites that take part said of themselves.
        refused: who will not take part, and why.
        away: who was missing by a deadline; it is asked, but not waited for before it answers again.
    """

    run: str
    names: Sequence[str]
    courier: Transport
    check: Callable[[Request, Reply], None]
    hello: Callable[[str], bytes]
    start: Callable[[], bytes]
    deadline: float
    folder: Path
    tell: Callable[[Event], None]
    crossing: ActivationServer | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    welcome: dict[str, WelcomeHeader] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)

    def clients(self) -> Sequence[str]:
        """The sites' names."""
        return self.names

    def gather(self) -> list[NoReply]:
        """Greet all sites and hand them the start model; those that do not take part, and why."""
        answers = self._side_by_side({name: self._greet(name) for name in self.names}, -1, self.deadline)
        return [answer for answer in answers if isinstance(answer, NoReply)]

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
        """One answer per request; a site that comes late to the run is greeted first."""
        made = list(requests)
        if self.crossing and made[0].plan.server and made[0].phase != "receive":
            self.crossing.expect(made, self.tokens)
        talks = {request.client: self._ask(request) for request in made}
        for answer in self._side_by_side(talks, made[0].round, self.deadline):
            if isinstance(answer, NoReply) and self.crossing:
                self.crossing.drop(answer.client)
            yield answer

    def farewell(self, save: bool) -> None:
        """Tell every site that the stage is over; who is not there, or busy, is not waited for."""
        self.away |= set(self.names)
        list(self._side_by_side({name: self._part(save) for name in self.welcome}, -1, LAST))

    def _greet(self, name: str) -> Conversation:
        answer = (yield partial(self.hello, name)).header
        if isinstance(answer, WelcomeHeader) and not answer.holds:
            answer = (yield self.start).header
        if not isinstance(answer, WelcomeHeader):
            raise WireError("does not greet back")
        self.welcome[name] = answer
        return answer

    def _ask(self, request: Request) -> Conversation:
        if request.client not in self.welcome:
            yield from self._greet(request.client)
        answer = yield partial(of_request, self.run, request)
        if not isinstance(answer.header, ReplyHeader):
            raise WireError("does not reply")
        reply = reply_in(answer)
        if reply.client != request.client:
            raise WireError(f"answers as {reply.client!r}")
        self.check(request, reply)
        return reply

    def _part(self, save: bool) -> Conversation:
        answer = (yield partial(seal, self.run, FarewellHeader(save=save))).header
        if not isinstance(answer, WelcomeHeader):
            raise WireError("does not say farewell")
        return answer

    def _side_by_side(
        self, talks: Mapping[str, Conversation], round: int, deadline: float
    ) -> Iterator[Reply | NoReply]:
        """Talk to several sites at once; each ends in a reply, or is missing. A welcome ends in nothing."""
        began = time.monotonic()
        until = began + deadline
        turns: dict[str, PendingReply] = {}
        for name, talk in talks.items():
            if name in self.refused:
                yield NoReply(name, self.refused[name])
            else:
                turns[name] = PendingReply(talk, next(talk))
        told: set[str] = set()
        while turns:
            now, there = time.monotonic(), self.courier.online()
            for name, turn in turns.items():
                if turn.number and there.get(name, turn.presence) != turn.presence:
                    turn.number = ""  # it has started again since, and knows nothing of the message
                if not turn.number and name in there and now >= turn.since:
                    self._tell(round, name, turn, there[name], until)
            asked = {turn.number: name for name, turn in turns.items() if turn.number}
            for number, answer in self.courier.receive(asked):
                if (name := asked.pop(number, "")) == "":
                    continue  # it has answered before
                turns[name].number, turns[name].since = "", now + PAUSE
                if answer is None:
                    continue
                try:
                    self._hear(round, name, turns[name], answer)
                except StopIteration as end:
                    del turns[name]
                    if isinstance(end.value, Reply):
                        yield end.value
                except WireError as error:
                    del turns[name]
                    self.welcome.pop(name, None)  # it may know nothing of the run any more: greet it again
                    yield NoReply(name, str(error))
            late = turns.keys() - there.keys() - told
            if late - self.away and now > began + SILENCE:
                told |= late
                self.tell(Waiting(tuple(sorted(late)), until - now))
            if now > until or not any(turn.number or name not in self.away for name, turn in turns.items()):
                for name in turns:
                    self.away.add(name)
                    yield NoReply(name, "did not answer in time" if name in there else "is not connected")
                return
            time.sleep(min(1.0, max(POLL, (now - began) / 50)) if turns else 0)

    def _tell(self, round: int, name: str, turn: PendingReply, there: Presence, until: float) -> None:
        message = turn.make()
        turn.sent, turn.presence = time.monotonic(), there
        turn.number = self.courier.send(there, message, until - turn.sent)
        turn.since = turn.sent + PAUSE
        self._record(round, name, "down", len(message), None)

    def _hear(self, round: int, name: str, turn: PendingReply, answer: bytes) -> None:
        self.away.discard(name)
        self._record(round, name, "up", len(answer), time.monotonic() - turn.sent)
        turn.make, turn.since = turn.talk.send(self._open(name, answer)), 0.0

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

    def _record(self, round: int, name: str, way: str, size: int, seconds: float | None) -> None:
        record = {"round": round, "client": name, "direction": way, "bytes": size, "seconds": seconds}
        state.append(self.folder / "transport.jsonl", [record])
