"""The server's transport: Flower says who is there and calls a site, which then comes for its messages itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

from fedstrata.sites.admission import REVOKED
from fedstrata.sites.engine import Presence
from fedstrata.sites.message_server import MessageServer
from fedstrata.sites.message_stream import CallHeader
from fedstrata.sites.messages import Answer
from fedstrata.wire.tensor_file import TensorFile

CALL_SECONDS = 15.0
"""Between two calls of a site that does not come."""
CALL_LASTS = 60.0
"""Seconds after which a call expires."""
GRACE_SECONDS = 2.0
"""For which a site that was there a moment ago is not called."""
LONGEST_REASON = 300
"""Characters of why a site cannot come."""


class Caller(Protocol):
    """Knows the sites; see :class:`fedstrata.sites.flower.FlowerTransport`."""

    def online(self) -> dict[str, Presence]:
        """The sites that are connected now."""

    def send(self, to: Presence, message: bytes, seconds: float) -> str:
        """Send a short message that expires after so many seconds; returns its id."""

    def receive(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """The answers to these messages that have arrived; None in place of an answer that will not come."""


class SiteTransport:
    """Carries messages to sites; see :class:`fedstrata.sites.engine.Transport`.

    Args:
        caller: knows the sites.
        server: where the sites come for their messages.
        tokens: site -> the token by which the server knows it.
        revoked: the sites whose keys are not valid any more; a message to one of them is answered here.
    """

    def __init__(
        self,
        caller: Caller,
        server: MessageServer,
        tokens: Mapping[str, str],
        revoked: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.caller, self.server, self.tokens, self.revoked = caller, server, tokens, revoked
        self.present: dict[str, Presence] = {}
        self.called: dict[str, tuple[Presence, float]] = {}
        self.calls: dict[str, str] = {}

    def online(self) -> dict[str, Presence]:
        """The sites that are connected now."""
        gone = set(self.revoked())
        online = {
            name: at for name, at in self.caller.online().items() if name in self.tokens and name not in gone
        }
        self.present = online | {name: (-1, name) for name in self.tokens if name in gone}
        for name in gone:
            self.server.revoke(name, REVOKED)
        return self.present

    def send(self, to: Presence, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        """Leave a message for a site to fetch; returns its id."""
        [name] = [name for name, presence in self.present.items() if presence == to]
        id = self.server.post(name, message, seconds, answer_bytes)
        if name in self.revoked():
            self.server.revoke(name, REVOKED)
        return id

    def receive(self, ids: Iterable[str]) -> Iterator[tuple[str, Answer]]:
        """The answers to these messages that have arrived."""
        self._hear()
        for name, presence in self.present.items():
            if presence != (-1, name):
                self._call(name, presence)
        yield from self.server.take(ids)

    def wait(self, seconds: float) -> None:
        """Wait so long, or until an answer arrives."""
        self.server.wait(seconds)

    def _call(self, name: str, presence: Presence) -> None:
        """Call a site that has a message to fetch and does not come."""
        before, when = self.called.get(name, (None, 0.0))
        due = before != presence or time.monotonic() > when + CALL_SECONDS
        if due and self.server.absent_for(name) > GRACE_SECONDS:
            self.called[name] = presence, time.monotonic()
            call = CallHeader(port=self.server.port, token=self.tokens[name]).model_dump_json().encode()
            self.calls[self.caller.send(presence, call, CALL_LASTS)] = name

    def _hear(self) -> None:
        """What the sites have answered to calls: nothing, or why they cannot come."""
        for id, answer in list(self.caller.receive(self.calls)) if self.calls else ():
            if (name := self.calls.pop(id, "")) and answer:
                self.server.fail(name, answer.decode(errors="replace")[:LONGEST_REASON])
