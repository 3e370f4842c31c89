"""The engine over sites: requests go out as messages; a site may take until the deadline, whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fedstrata.errors import FULL
from fedstrata.events import Event, Waiting
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.server.records import Records
from fedstrata.sites.answered import check_answered
from fedstrata.sites.conversation import Awaiting, Conversation, Outgoing, PendingReply, Refusals, other_count
from fedstrata.sites.conversation import Presence as Presence  # its users know it from here
from fedstrata.sites.lost import Losses
from fedstrata.sites.messages import (
    Answer,
    Envelope,
    FarewellHeader,
    RefusalHeader,
    ReplyHeader,
    WelcomeHeader,
    decode_message,
    decode_reply,
    encode_message,
    encode_request,
)
from fedstrata.wire.codec import WireError
from fedstrata.wire.foreign import plain_text
from fedstrata.wire.tensor_file import TensorFile

if TYPE_CHECKING:
    from fedstrata.sites.activation_server import ActivationServer

LOG = logging.getLogger("fedstrata.server")
POLL_SECONDS = 0.1
"""Between two polls for answers, at first; later a fiftieth of the time that has passed, up to a second."""
RETRY_SECONDS, FAREWELL_SECONDS = 5.0, 60.0
"""Before a lost message is sent again; deadline of the last message of a stage."""
REPORT_SECONDS = 5.0
"""After which the sites that are not connected are reported."""


class Transport(Protocol):
    """Carries messages to sites; see :class:`fedstrata.sites.transport.SiteTransport`."""

    def online(self) -> dict[str, Presence]:
        """The sites that are connected now."""

    def send(self, to: Presence, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        """Send a message, to be answered within so many seconds with at most so many bytes of tensors; its id."""

    def receive(self, ids: Iterable[str]) -> Iterator[tuple[str, Answer]]:
        """The answers to these messages that have arrived."""

    def wait(self, seconds: float) -> None:
        """Wait so long, or until an answer arrives."""


@dataclass(frozen=True)
class RemoteRun:
    """One stage as its sites know it.

    Attributes:
        id: names the stage in every message.
        names: the sites' names, in canonical order.
        hello: makes a site's first message.
        start: makes the message with the start model.
        check: raises WireError for a reply that does not answer its request.
        agreement: digest of the job as the sites are told it, see :func:`fedstrata.sites.approval.job_digest`.
        answer_bytes: most bytes of tensors in the reply to a request, of a site with so many examples.
        tokens: site -> its token for the activation stream.
        start_digest: fingerprint of the start model, which every reply names.
        most_weight: site -> most examples for which it counts in a mean; who is not in it counts for all.
        keeps: what a site keeps from round to round, and the server has not.
    """

    id: str
    names: Sequence[str]
    hello: Callable[[str], TensorFile]
    start: Callable[[], TensorFile]
    check: Callable[[Request, Reply], None]
    answer_bytes: Callable[[Request, int], int]
    agreement: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    start_digest: str = ""
    most_weight: Mapping[str, int] = field(default_factory=dict)
    keeps: Sequence[str] = ()


@dataclass
class RemoteEngine:
    """One stage's sites.

    Attributes:
        run: the stage.
        transport: carries the messages.
        deadline: seconds that a site has for its answer.
        records: where every message's bytes are recorded, as ``transport``.
        on_event: receives events.
        activation_server: where batches pass through the server's layers; None where the method has none.
        welcomes: site that takes part -> its welcome.
        agreed: site -> its examples as it first said, which hold for the rest of the run.
        refusals: why sites take no part.
        absent: sites that missed a deadline: they get requests, but are waited for only once they answer again.
        own_start: sites that have the start model without having been sent it.
        losses: tells which sites have lost what they kept.
        greeted: told of ``agreed`` whenever a site was greeted.
    """

    run: RemoteRun
    transport: Transport
    deadline: float
    records: Records
    on_event: Callable[[Event], None]
    activation_server: ActivationServer | None = None
    welcomes: dict[str, WelcomeHeader] = field(default_factory=dict, init=False)
    agreed: dict[str, int] = field(default_factory=dict, init=False)
    refusals: Refusals = field(default_factory=Refusals, init=False)
    absent: set[str] = field(default_factory=set, init=False)
    own_start: frozenset[str] = frozenset()
    losses: Losses = field(init=False)
    greeted: Callable[[Mapping[str, int]], None] = lambda agreed: None

    def __post_init__(self) -> None:
        self.losses = Losses(self.records, self.run.keeps, self.on_event)

    def clients(self) -> Sequence[str]:
        """The sites' names."""
        return self.run.names

    def gather(self) -> list[NoReply]:
        """Greet all sites and send them the start model; returns those that do not take part."""
        replies = self._converse({name: self._greet(name) for name in self.run.names}, -1, self.deadline)
        return [reply for reply in replies if isinstance(reply, NoReply)]

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
        """One reply per request; a site that comes late to the run is greeted first."""
        batch = list(requests)
        if self.activation_server and batch and batch[0].passes_layers:
            self.activation_server.expect(batch, self.run.tokens, self.absent)
        conversations = {request.client: self._request(request) for request in batch}
        for reply in self._converse(conversations, batch[0].round if batch else -1, self.deadline):
            if isinstance(reply, NoReply) and self.activation_server:
                self.activation_server.drop(reply.client)
            yield reply

    def farewell(self, save: bool) -> list[NoReply]:
        """Tell every site that took part that the stage is over; one that is offline or busy is not waited for.

        Returns:
            The sites that have not heard it, so that none of them has saved its own model.
        """
        self.absent |= set(self.run.names)
        self.refusals.clear()  # who has reached a limit on the way ends the run as well
        conversations = {name: self._farewell(save) for name in self.agreed}
        return [no for no in self._converse(conversations, -1, FAREWELL_SECONDS) if isinstance(no, NoReply)]

    def _greet(self, name: str) -> Conversation:
        welcome = (yield Outgoing(partial(self.run.hello, name))).header
        if isinstance(welcome, WelcomeHeader) and not welcome.holds:
            welcome = (yield Outgoing(self.run.start)).header
        if not isinstance(welcome, WelcomeHeader) or not welcome.holds or not welcome.examples:
            raise WireError("does not greet back with examples and the start model")
        if self.agreed.setdefault(name, welcome.examples) != welcome.examples:
            raise WireError(other_count(welcome.examples, self.agreed[name]))
        self.welcomes[name] = welcome
        self.greeted(self.agreed)
        return welcome

    def _request(self, request: Request) -> Conversation:
        if request.client not in self.welcomes:
            yield from self._greet(request.client)
        size = self.run.answer_bytes(request, self.welcomes[request.client].examples)
        envelope = yield Outgoing(partial(encode_request, self.run.id, request), size)
        if not isinstance(envelope.header, ReplyHeader):
            raise WireError("does not reply")
        reply = decode_reply(envelope)
        if reply.client != request.client:
            raise WireError(f"answers as {reply.client[:100]!r}")
        known = check_answered(envelope.answers, request, self.run.start_digest)
        if reply.examples != self.agreed[request.client]:
            raise WireError(other_count(reply.examples, self.agreed[request.client]))
        self.run.check(request, reply)
        if self.activation_server:
            self.activation_server.check_held(request)
        self.losses.hear(request, known)
        return replace(reply, examples=self.weight(request.client))

    def weight(self, name: str) -> int:
        """The examples for which a site counts: as agreed at the greeting, and no more than the server allows."""
        return min(self.agreed[name], self.run.most_weight.get(name, self.agreed[name]))

    def _farewell(self, save: bool) -> Conversation:
        farewell = partial(encode_message, self.run.id, FarewellHeader(save=save))
        welcome = (yield Outgoing(farewell)).header
        if not isinstance(welcome, WelcomeHeader):
            raise WireError("does not say farewell")
        return welcome

    def _converse(
        self, conversations: Mapping[str, Conversation], round: int, deadline: float
    ) -> Iterator[Reply | NoReply]:
        """Hold several sites' conversations at once: the replies, and who gave none. A welcome yields nothing."""
        start, refusals = time.monotonic(), self.refusals.now(self.transport.online)
        pending: dict[str, PendingReply] = {}
        for name, conversation in conversations.items():
            if name in refusals:
                yield NoReply(name, refusals[name])
            else:
                pending[name] = PendingReply(conversation, next(conversation), start + deadline)
        reported, awaiting = set[str](), Awaiting(round, self.on_event)
        while pending:
            awaiting([name for name in pending if name not in self.absent], start + deadline)
            now, online = time.monotonic(), self.transport.online()
            self._send(round, pending, online)
            yield from self._receive(round, pending, now)
            if now > start + REPORT_SECONDS:
                self._report_offline(pending.keys() - online.keys(), reported, start + deadline - now)
            waits = any(reply.message_id or name not in self.absent for name, reply in pending.items())
            if now > start + deadline or not waits:
                for name in pending:
                    self.absent.add(name)
                    yield NoReply(name, "did not answer in time" if name in online else "is not connected")
                return
            self.transport.wait(min(1.0, max(POLL_SECONDS, (now - start) / 50)))

    def _send(self, round: int, pending: Mapping[str, PendingReply], online: Mapping[str, Presence]) -> None:
        """Send what is due to the sites that are online."""
        for name, reply in pending.items():
            if reply.message_id and online.get(name, reply.presence) != reply.presence:
                reply.message_id = ""  # the site has restarted since, and has lost the message
            if reply.message_id or name not in online or time.monotonic() < reply.send_after:
                continue
            message = reply.outgoing.make()
            reply.sent_at, reply.presence = time.monotonic(), online[name]
            seconds, size = reply.until - reply.sent_at, reply.outgoing.answer_bytes
            reply.message_id = self.transport.send(online[name], message, seconds, size)
            reply.send_after = reply.sent_at + RETRY_SECONDS
            self._record(round, name, "down", len(message), None)

    def _receive(self, round: int, pending: dict[str, PendingReply], now: float) -> Iterator[Reply | NoReply]:
        """Go on with the conversations that have an answer; those that end leave ``pending``."""
        sent = {reply.message_id: name for name, reply in pending.items() if reply.message_id}
        for message_id, answer in self.transport.receive(sent):
            if (name := sent.pop(message_id, "")) == "":
                continue  # a duplicate
            pending[name].message_id, pending[name].send_after = "", now + RETRY_SECONDS
            if answer is None:
                continue
            try:
                self._continue(round, name, pending[name], answer)
            except StopIteration as end:
                del pending[name]
                if isinstance(end.value, Reply):
                    yield end.value
            except Exception as error:
                if isinstance(error, OSError) and error.errno in FULL:  # here, so that no site is to blame
                    raise
                del pending[name]
                self.welcomes.pop(name, None)  # the site may have lost the run's state: redo the handshake
                why = plain_text(str(error))
                if not isinstance(error, WireError):  # nothing that a site sends may end the run
                    LOG.info("%s: its answer cannot be read", name, exc_info=error)
                    why = f"sends what cannot be read ({type(error).__name__})"
                yield NoReply(name, why)

    def _continue(self, round: int, name: str, to: PendingReply, answer: bytes | TensorFile | WireError) -> None:
        if isinstance(answer, WireError):
            raise answer
        self.absent.discard(name)
        self._record(round, name, "up", len(answer), time.monotonic() - to.sent_at)
        to.outgoing, to.send_after = to.conversation.send(self._open(name, to.presence, answer)), 0.0

    def _open(self, name: str, presence: Presence | None, answer: bytes | TensorFile) -> Envelope:
        envelope = decode_message(answer, "welcome", "reply", "refusal")
        if envelope.run != self.run.id and (envelope.run or not isinstance(envelope.header, RefusalHeader)):
            raise WireError("answers for another run")
        if isinstance(header := envelope.header, RefusalHeader):
            if header.final:
                self.refusals.note(name, presence, plain_text(header.reason))
            raise WireError(header.reason)
        return envelope

    def _report_offline(self, offline: set[str], reported: set[str], seconds: float) -> None:
        """Report sites that are waited for and not connected, each of them once."""
        new = offline - reported
        if new - self.absent:
            reported |= new
            self.on_event(Waiting(tuple(sorted(new)), seconds))

    def _record(self, round: int, name: str, way: str, size: int, seconds: float | None) -> None:
        record = {"round": round, "client": name, "direction": way, "bytes": size, "seconds": seconds}
        self.records.append("transport", [record])
