"""Split training between machines: a client's batches and what the server's layers make of them, over gRPC.

A visit is one stream in both directions, open for one client and one request. The client speaks, the server
answers, and neither goes on before it has heard the other:

    the client                       the server
    begin     how its steps go       begin
    forward   hidden states          forward    hidden states
    backward  gradients              backward   gradients, then the layers step
    end                              end        what the visit came to has been kept

``forward`` and ``backward`` come as often as ``begin`` said; a client that is scored sends ``forward`` alone, and
``end``. Each message is one safetensors file with a small checked header; what its tensors must be is known to
:mod:`fedstrata.wire.activations`. A stream that closes without ``end`` has broken off and leaves nothing behind.
"""

from __future__ import annotations

import hmac
import importlib.util
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import safetensors.torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.server.layers import ServerLayers, SplitSession
from fedstrata.sites.messages import Header
from fedstrata.wire.codec import WireError

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if importlib.util.find_spec("grpc") is None:
    raise UserError("split learning between sites: needs the extra 'flower': pip install 'fedstrata[flower]'")

import grpc

SERVICE, METHOD = "fedstrata.Layers", "visit"
MOST = 1000
"""Streams at once."""
LARGEST = 2**30
"""Bytes of the largest message that a client takes; the server's bound is that of its job's batches."""
BEAT = 30
"""Seconds between two signs of life on an idle connection, and those after which a missing one ends it."""
OPTIONS = {
    "grpc.keepalive_time_ms": BEAT * 1000,
    "grpc.keepalive_timeout_ms": BEAT * 1000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.min_ping_interval_without_data_ms": BEAT * 500,
}
"""Of every connection: while a client waits for its turn nothing but signs of life passes."""

Share = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int, Field(ge=1)]


class SessionFailed(WireError):
    """A visit that could not be ended."""


class ScheduleSpanHeader(Header):
    """How a client's steps go, see :class:`fedstrata.client.optimizer.ScheduleSpan`."""

    steps: Steps
    epoch: Steps
    begin: Share
    end: Share


class StreamHeader(Header):
    """A message's header: what it is, and with ``begin`` the pace."""

    kind: Literal["begin", "forward", "backward", "end"]
    pace: ScheduleSpanHeader | None = None


def of_word(word: StreamHeader, tensors: Tensors) -> bytes:
    """A message as it travels."""
    sent = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return bytes(safetensors.torch.save(sent, {"word": word.model_dump_json()}))


def word_in(message: bytes) -> tuple[StreamHeader, Tensors]:
    """The header and the tensors of a message; these are still to be checked.

    They are copied once, to memory as torch allots it: from elsewhere a matrix product may differ in the last bit.

    Raises:
        WireError: it is no message of a visit.
    """
    try:
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(message).items()}
        size = int.from_bytes(message[:8], "little")
        word = StreamHeader.model_validate_json(json.loads(message[8 : 8 + size])["__metadata__"]["word"])
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, ValidationError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise WireError(f"not a message of a visit: {first}") from None
    if (word.kind == "begin") != (word.pace is not None) or (word.kind in ("begin", "end") and tensors):
        raise WireError(f"{word.kind}: a pace goes with begin alone, tensors with neither begin nor end")
    return word, tensors


class SessionCanceled(Exception):
    """The visit at hand has been given up."""


@dataclass(eq=False)
class Session:
    """A client whose visit is awaited, or under way.

    Attributes:
        request: what it has been asked.
        queue: all who take turns with it, in their order, itself among them.
        stream: its end here, once it has come.
        steps: of its round, once it has said.
        made: steps made.
        between: its batch has gone forward and not yet back.
        silent: clock time since when it has been for the client to speak; infinite while it is not.
        left: it has ended its visit.
        gone: its visit is over, or given up.
        over: nothing of its visit uses the layers any longer.
    """

    request: Request
    queue: list[Session] = field(default_factory=list)
    stream: Any = None
    steps: int | None = None
    made: int = 0
    between: bool = False
    silent: float = math.inf
    left: bool = False
    gone: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def learns(self) -> bool:
        """It trains; else it is scored."""
        return self.request.phase == "train"

    def due(self) -> tuple[str, ...]:
        """What its next message may be."""
        if not self.learns:
            return "forward", "end"
        if self.steps is None:
            return ("begin",)
        if self.between:
            return ("backward",)
        return ("forward",) if self.made < self.steps else ("end",)

    def first(self) -> bool:
        """It is its turn: of all with batches left none has made fewer, and none before it as few."""
        left = [one for one in self.queue if not one.gone and (one.steps is None or one.made < one.steps)]
        return min(left, key=lambda one: one.made) is self


class ActivationServer:
    """The server's end: clients come to its layers and leave them.

    Those who train one set of layers do so batch by batch, client after client in the order of their requests,
    whoever arrives first; so do they in :class:`fedstrata.engines.local.LocalEngine`, to the same bits. A client
    that has made all its steps, breaks off or is given up is no longer waited for. Where each has its own copy,
    or one trains at a time, nobody waits.

    Args:
        layers: what is visited.
        address: "HOST:PORT" to listen at; port 0 takes a free one.
        tls: certificate chain and key (PEM); None: plain text, for tests on one machine.
        deadline: seconds for which a client may leave the server waiting in the middle of its visit before it is
            broken off; they do not run while the client waits for its turn or for the layers.

    Attributes:
        port: the port listened at.

    Raises:
        UserError: the address cannot be listened at.
    """

    def __init__(
        self, layers: ServerLayers, address: str, tls: tuple[bytes, bytes] | None, deadline: float
    ) -> None:
        self.layers, self.deadline = layers, deadline
        self.guests: dict[str, Session] = {}
        self.tokens: dict[str, bytes] = {}
        self.nobody = secrets.token_bytes(32)
        self.changed = threading.Condition()
        self.closed = threading.Event()
        train = layers.worker.train
        largest = (
            2 * train.batch_size * layers.longest * layers.worker.parts.hidden * 4 + 2**16
        )  # of fp32, scoring
        options = {
            **OPTIONS,
            "grpc.http2.min_recv_ping_interval_without_data_ms": BEAT * 500,
            "grpc.max_receive_message_length": largest,
            "grpc.so_reuseport": 0,
        }
        self.threads = ThreadPoolExecutor(MOST, "crossing")
        self.server = grpc.server(self.threads, options=list(options.items()), maximum_concurrent_rpcs=MOST)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            if tls:
                chain, key = tls
                own = grpc.ssl_server_credentials([(key, chain)])
                self.port: int = self.server.add_secure_port(address, own)
            else:
                self.port = self.server.add_insecure_port(address)
        except RuntimeError:
            raise UserError(f"cannot listen at {address} for the hidden states of clients") from None
        self.server.start()
        self.watch = threading.Thread(target=self._watch, name="crossing watch", daemon=True)
        self.watch.start()

    def __enter__(self) -> ActivationServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, requests: Sequence[Request], tokens: Mapping[str, str]) -> None:
        """Await from now on the visits of these requests, of those that have any, and none of others.

        Turns are taken in their order.

        Args:
            requests: what clients who train at once, or are scored, are asked.
            tokens: client -> the secret by which it is known, all the run.
        """
        for former in list(self.guests.values()):
            self._end(former)
        guests = [Session(request) for request in requests if request.plan.server]
        for guest in guests:
            turns = guest.learns and not self.layers.copies
            guest.queue = [one for one in guests if one.learns] if turns else [guest]
        with self.changed:
            self.tokens.update({client: token.encode() for client, token in tokens.items()})
            self.guests = {guest.request.client: guest for guest in guests}

    def drop(self, client: str) -> None:
        """The client is given up: when this returns nothing of its visit is left, whatever it was doing.

        Who has not answered must be dropped before the layers are used for anything else.
        """
        if guest := self.guests.get(client):
            self._end(guest)
        self.layers.results.pop(client, None)

    def close(self) -> None:
        """End all visits and listen no longer."""
        self.closed.set()
        for guest in list(self.guests.values()):
            self._end(guest)
        self.server.stop(None).wait()
        self.threads.shutdown()
        self.watch.join()

    def _end(self, guest: Session) -> None:
        """Break a visit off, and wait until nothing of it uses the layers."""
        self._break(guest)
        if guest.stream:
            guest.over.wait()

    def _break(self, guest: Session) -> None:
        self._go(guest)
        if guest.stream and not guest.over.is_set():
            guest.stream.cancel()

    def _go(self, guest: Session) -> None:
        with self.changed:
            guest.gone = True
            self.changed.notify_all()

    def _watch(self) -> None:
        """Break off who has been silent for too long: it need not even take its answer."""
        while not self.closed.wait(min(1.0, self.deadline / 10)):
            for guest in list(self.guests.values()):
                if not guest.gone and time.monotonic() - guest.silent > self.deadline:
                    self._break(guest)

    def _serve(self, messages: Iterator[bytes], stream: Any) -> Iterator[bytes]:
        """One stream; a message is read when the answer to the one before has been sent."""
        guest = self._admit(stream)
        visit: SplitSession | None = None
        try:
            visit = self.layers.visit(guest.request)
            guest.silent = time.monotonic()
            for message in messages:
                guest.silent = math.inf
                answer = self._answer(guest, visit, message)
                guest.silent = time.monotonic()
                yield answer
                if guest.left:
                    break
        except grpc.RpcError:
            return
        except SessionCanceled:
            stream.abort(grpc.StatusCode.CANCELLED, "")
        except WireError as error:
            stream.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            logging.getLogger(__name__).exception("the visit of %s failed", guest.request.client)
            stream.abort(grpc.StatusCode.INTERNAL, "the layers failed; the server's log tells why")
        finally:
            try:
                if visit and not guest.left:
                    self.layers.abandon(visit)
            finally:
                self._go(guest)
                guest.over.set()

    def _admit(self, stream: Any) -> Session:
        """Who comes, if that is who is awaited; what a stranger is told depends on nothing that it could guess."""
        said = dict(stream.invocation_metadata())
        client = said.get("client-bin", b"").decode(errors="replace")
        known = self.tokens.get(client, self.nobody)
        if not hmac.compare_digest(said.get("token-bin", b""), known):
            stream.abort(grpc.StatusCode.UNAUTHENTICATED, "client or token is not known")
        with self.changed:
            guest = self.guests.get(client)
            awaited = guest is not None and not guest.gone and guest.stream is None
            if guest and awaited and said.get("visit") == _name(guest.request):
                guest.stream = stream
                if not stream.add_callback(lambda: self._go(guest)):
                    guest.gone = True
                return guest
        stream.abort(grpc.StatusCode.FAILED_PRECONDITION, "this visit is not awaited")
        raise AssertionError  # abort has raised

    def _answer(self, guest: Session, visit: SplitSession, message: bytes) -> bytes:
        word, tensors = word_in(message)
        if word.kind not in guest.due():
            raise WireError(f"{word.kind}: cannot come now; due: {' or '.join(guest.due())}")
        made: Tensors = {}
        if word.pace:
            pace = ScheduleSpan(**dict(word.pace))
            if (pace.begin, pace.end) != guest.request.span:
                raise WireError("begin: another share of the run than the client was asked for")
            visit.begin(pace)
            guest.steps = pace.steps
        elif word.kind == "forward":
            self._turn(guest)
            made = visit.forward(tensors)
        elif word.kind == "backward":
            made = visit.backward(tensors)
        elif guest.gone:
            raise SessionCanceled
        else:
            self.layers.leave(visit)
            guest.left = True
        with self.changed:
            guest.between = guest.learns and word.kind == "forward"
            guest.made += word.kind == "backward"
            self.changed.notify_all()
        return of_word(StreamHeader(kind=word.kind, pace=word.pace), made)

    def _turn(self, guest: Session) -> None:
        """Wait until it is the client's turn."""
        with self.changed:
            self.changed.wait_for(lambda: guest.gone or guest.first())
            if guest.gone:
                raise SessionCanceled


class ActivationClient:
    """The client's end: a :class:`fedstrata.models.cut.SplitLink` to layers on another machine, for one request.

    As a context it ends the visit when the block does; left by an exception, it breaks the visit off.

    Args:
        address: "HOST:PORT" of the server.
        request: what the client has been asked.
        token: the secret by which the server knows the client.
        ca: certificates (PEM) of those who may sign the server's; None: plain text, for tests on one machine.
        deadline: seconds to wait for an answer, and so for the turns of the others.

    Raises:
        SessionFailed: from every method, if the server refuses, does not answer or cannot be reached.
    """

    def __init__(self, address: str, request: Request, token: str, ca: bytes | None, deadline: float) -> None:
        self.address, self.deadline = address, deadline
        options = {
            **OPTIONS,
            "grpc.max_receive_message_length": LARGEST,
            "grpc.use_local_subchannel_pool": 1,
        }
        given = list(options.items())
        if ca is None:
            self.channel = grpc.insecure_channel(address, given)
        else:
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), given)
        self.sent: SimpleQueue[bytes | None] = SimpleQueue()
        who = ("client-bin", request.client.encode()), ("token-bin", token.encode()), ("visit", _name(request))
        self.stream = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(self.sent.get, None), metadata=who)
        self.thread = ThreadPoolExecutor(1, "far")

    def __enter__(self) -> ActivationClient:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.break_off()

    def begin(self, pace: ScheduleSpan) -> None:
        """Say how the client's steps go; before the first one."""
        self._say(StreamHeader(kind="begin", pace=ScheduleSpanHeader.model_validate(vars(pace))), {})

    def forward(self, message: Tensors) -> Tensors:
        """What the layers make of a batch's hidden states."""
        return self._say(StreamHeader(kind="forward"), message)

    def backward(self, message: Tensors) -> Tensors:
        """The gradient of the loss by the states sent, from that by those received; then the layers step."""
        return self._say(StreamHeader(kind="backward"), message)

    def close(self) -> None:
        """End the visit: what it came to is kept by the server when this returns."""
        try:
            self._say(StreamHeader(kind="end"), {})
        finally:
            self.break_off()

    def break_off(self) -> None:
        """Close the stream; without an end before it the server forgets the visit."""
        self.sent.put(None)
        self.stream.cancel()
        self.channel.close()
        self.thread.shutdown()

    def _say(self, word: StreamHeader, message: Tensors) -> Tensors:
        """Send a message, return the tensors of the answer, which are still to be checked."""
        self.sent.put(of_word(word, message))
        try:
            answer: bytes | None = self.thread.submit(next, self.stream, None).result(self.deadline)
            if answer is None:
                raise WireError("the stream has ended")
            said, tensors = word_in(answer)
        except TimeoutError:
            raise SessionFailed(
                f"the server at {self.address} did not answer within {self.deadline:g} s"
            ) from None
        except grpc.RpcError as error:
            raise SessionFailed(f"the server at {self.address} {_reason(error)}") from None
        except WireError as error:
            raise SessionFailed(f"the server at {self.address} did not answer {word.kind}: {error}") from None
        if said.kind != word.kind:
            raise SessionFailed(f"the server at {self.address} did not answer {word.kind}: it said {said.kind}")
        return tensors


def _name(request: Request) -> str:
    """By which a client's stream says what it answers, so that one that is late is not taken for the next."""
    return f"{request.round} {request.phase}"


def _reason(error: Any) -> str:
    """Why a stream ended, without its subject."""
    told = " ".join(str(error.details()).split())
    reasons = {
        grpc.StatusCode.CANCELLED: "broke the visit off: it was given up, or silent for too long",
        grpc.StatusCode.UNAVAILABLE: f"cannot be reached: {told}",
    }
    return reasons.get(error.code(), f"refuses: {told}")
