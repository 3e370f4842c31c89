"""The server's end of split learning between machines: clients come to its layers, one stream each."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Request
from fedstrata.server.layers import ServerLayers, SplitSession
from fedstrata.sites.listening import ServerTLS, caller, listen
from fedstrata.sites.sessions import Session, SessionCanceled
from fedstrata.sites.stream import (
    KEEPALIVE_SECONDS,
    METHOD,
    OPTIONS,
    SERVICE,
    StreamHeader,
    decode_stream_message,
    encode_stream_message,
    session_name,
)
from fedstrata.wire.codec import WireError

import grpc  # isort: skip  (stream says first what is needed for it)

MAX_STREAMS = 1000
"""Streams that are open at once."""


class ActivationServer:
    """The server's end: clients' batches pass through its layers.

    Clients that train one set of layers take turns batch by batch, in the order of their requests and not of their
    arrival; so do they in :class:`fedstrata.engines.local.LocalEngine`, with the same bits. A client that has
    taken all its steps, disconnects or is dropped is no longer waited for, nor one that has not connected in time
    before it does. Where each client has its own copy of the layers, or one client trains at a time, nobody waits.

    Args:
        layers: the server's layers.
        address: "HOST:PORT" to listen on; port 0 takes an unused one.
        tls: see :func:`fedstrata.sites.listening.listen`; None: plain text, for tests on one machine.
        deadline: seconds for which a client may keep the server waiting, to connect or within its session, before
            it is canceled; the time for which it waits for its turn or for the layers does not count.

    Attributes:
        port: the port that it listens on.

    Raises:
        UserError: the address cannot be listened on.
    """

    def __init__(self, layers: ServerLayers, address: str, tls: ServerTLS | None, deadline: float) -> None:
        self.layers, self.deadline = layers, deadline
        self.sessions: dict[str, Session] = {}
        self.tokens: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.threads = ThreadPoolExecutor(MAX_STREAMS, "activation server")
        options = list(_server_options(layers).items())
        self.server = grpc.server(self.threads, options=options, maximum_concurrent_rpcs=MAX_STREAMS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.port = listen(self.server, address, tls, "cannot listen on {address} for the activations of clients")
        self.server.start()
        self.watchdog = threading.Thread(target=self._watch, name="activation watchdog", daemon=True)
        self.watchdog.start()

    def __enter__(self) -> ActivationServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, requests: Sequence[Request], tokens: Mapping[str, str], late: Collection[str] = ()) -> None:
        """Expect the sessions of these requests and no others; clients take turns in their order.

        Args:
            requests: of clients that train at once, or are scored; those without layers of the server are ignored.
            tokens: client -> the token by which it is known, for the whole run.
            late: clients whose turns are not waited for before they connect.
        """
        for former in list(self.sessions.values()):
            self._end(former)
        sessions = [Session(request, late=request.client in late) for request in requests if request.plan.server]
        for session in sessions:
            takes_turns = session.trains and not self.layers.settings.copies
            session.queue = [other for other in sessions if other.trains] if takes_turns else [session]
        with self.changed:
            self.tokens.update({client: token.encode() for client, token in tokens.items()})
            self.sessions = {session.request.client: session for session in sessions}

    def check_held(self, request: Request) -> None:
        """Refuse the answer of a client that has not ended its session: what it answers has not been through here.

        Raises:
            WireError: the client has not ended it.
        """
        if request.passes_layers and request.client not in self.layers.results:
            raise WireError("answers without having held its session on the server's layers")

    def drop(self, client: str) -> None:
        """Cancel a client's session and wait until nothing of it is left.

        A client that has not answered must be dropped before the layers are used for anything else.
        """
        if session := self.sessions.get(client):
            self._end(session)
        self.layers.results.pop(client, None)

    def close(self) -> None:
        """Cancel all sessions and stop listening."""
        self.closing.set()
        for session in list(self.sessions.values()):
            self._end(session)
        self.server.stop(None).wait()
        self.threads.shutdown()
        self.watchdog.join()

    def _end(self, session: Session) -> None:
        """Cancel a session, and wait until nothing of it uses the layers."""
        self._cancel(session)
        if session.stream:
            session.released.wait()

    def _cancel(self, session: Session) -> None:
        self._close(session)
        if session.stream and not session.released.is_set():
            session.stream.cancel()

    def _close(self, session: Session) -> None:
        with self.changed:
            session.closed = True
            self.changed.notify_all()

    def _watch(self) -> None:
        """Cancel sessions whose client exceeded the deadline, even in the middle of a write to it.

        One that has not begun may still be: its client has until the deadline of its whole answer.
        """
        while not self.closing.wait(min(1.0, self.deadline / 10)):
            for session in list(self.sessions.values()):
                begun = session.stream is not None  # looked at first, as the time is set first
                if session.closed or time.monotonic() - session.waiting_since <= self.deadline:
                    continue
                if begun:
                    self._cancel(session)
                elif not session.late:
                    with self.changed:
                        session.late = True
                        self.changed.notify_all()

    def _serve(self, messages: Iterator[bytes], stream: Any) -> Iterator[bytes]:
        """One stream; a message is read when the answer to the one before has been sent."""
        session = self._authenticate(stream)
        split: SplitSession | None = None
        try:
            split = self.layers.open(session.request)
            session.waiting_since = time.monotonic()
            for message in messages:
                session.waiting_since = math.inf
                answer = self._answer(session, split, message)
                session.waiting_since = time.monotonic()
                yield answer
                if session.ended:
                    break
        except grpc.RpcError:
            return
        except SessionCanceled:
            stream.abort(grpc.StatusCode.CANCELLED, "")
        except WireError as error:
            stream.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            logging.getLogger(__name__).exception("the session of %s failed", session.request.client)
            stream.abort(grpc.StatusCode.INTERNAL, "the layers failed; the server's log tells why")
        finally:
            try:
                if split and not session.ended:
                    self.layers.abandon(split)
            finally:
                self._close(session)
                session.released.set()

    def _authenticate(self, stream: Any) -> Session:
        """The expected session of a stream."""
        client, metadata = caller(stream, "client", self.tokens), dict(stream.invocation_metadata())
        with self.changed:
            session = self.sessions.get(client)
            expected = session is not None and not session.closed and session.stream is None
            if session and expected and metadata.get("session") == session_name(session.request):
                session.waiting_since, session.stream = math.inf, stream
                session.join()
                if not stream.add_callback(lambda: self._close(session)):
                    session.closed = True
                return session
        stream.abort(grpc.StatusCode.FAILED_PRECONDITION, "this session is not expected")
        raise AssertionError  # abort has raised

    def _answer(self, session: Session, split: SplitSession, message: bytes) -> bytes:
        header, tensors = decode_stream_message(message)
        if header.kind not in session.expected():
            raise WireError(f"{header.kind}: cannot come now; expected {' or '.join(session.expected())}")
        result: Tensors = {}
        if header.span:
            if (header.span.begin, header.span.end) != session.request.span:
                raise WireError("begin: another share of the run than the client was asked for")
            most = self.layers.train.steps
            if most is not None and header.span.steps > most:  # each of them moves layers that all share
                raise WireError(f"begin: {header.span.steps} steps, and a round has at most {most} (train.steps)")
            split.begin(header.span)
            session.steps = header.span.steps
        elif header.kind == "forward":
            self._await_turn(session)
            result = split.forward(tensors)
        elif header.kind == "backward":
            result = split.backward(tensors)
        elif session.closed:
            raise SessionCanceled
        else:
            self.layers.close(split)
            session.ended = True
        with self.changed:
            session.mid_batch = session.trains and header.kind == "forward"
            session.taken += header.kind == "backward"
            self.changed.notify_all()
        return encode_stream_message(StreamHeader(header.kind, header.span), result)

    def _await_turn(self, session: Session) -> None:
        with self.changed:
            self.changed.wait_for(lambda: session.closed or session.has_turn())
            if session.closed:
                raise SessionCanceled


def _server_options(layers: ServerLayers) -> dict[str, int]:
    """gRPC options; no message may be larger than twice a batch's hidden states in fp32 (scoring batches)."""
    batch = layers.train.batch_size * layers.settings.max_positions * layers.working.parts.hidden * 4
    return {
        **OPTIONS,
        "grpc.http2.min_recv_ping_interval_without_data_ms": KEEPALIVE_SECONDS * 500,
        "grpc.max_receive_message_length": 2 * batch + 2**16,
        "grpc.so_reuseport": 0,
    }
