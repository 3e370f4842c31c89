"""A site's end of messages: it fetches what it is asked, answers, and delivers the answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from fedstrata.events import Declined, SiteEvent
from fedstrata.sites.checks import join_address
from fedstrata.sites.free_memory import give_back
from fedstrata.sites.listening import ClientTLS, open_channel
from fedstrata.sites.message_stream import (
    DELIVER,
    FETCH,
    LATE,
    MOST_FRAME,
    SERVICE,
    CallHeader,
    frames,
    read_frames,
    read_header,
)
from fedstrata.sites.stream import OPTIONS
from fedstrata.wire.tensor_file import Reader, TensorFile

import grpc  # isort: skip  (stream says first what is needed for it)

LOG = logging.getLogger("fedstrata.site")
CONNECT_SECONDS = 10.0
"""For a connection to be made."""
RETRY_SECONDS = 300.0
"""For which a lost connection is tried again; after that the site waits to be called."""
PAUSE_SECONDS = 1.0
"""Between two tries."""


class Service(Protocol):
    """What answers; see :class:`fedstrata.sites.service.SiteService`."""

    def admit(self, metadata: Any, size: int) -> None:
        """Refuse tensors of so many bytes before they are received."""

    def answer(self, message: TensorFile) -> TensorFile:
        """The answer to a message."""

    def refuse(self, run: str, error: Exception) -> TensorFile:
        """The answer to a message that could not be used."""


class Over(Exception):
    """There is nothing more to fetch from this server."""


class MessageClient:
    """A site's connection to one run.

    Args:
        address: "HOST:PORT" of the server.
        site: the site's name.
        token: by which the server knows it.
        tls: see :data:`fedstrata.sites.listening.ClientTLS`; None: plain text, for tests on one machine.
        folder: on whose disk large messages wait; None: they are in memory.
    """

    def __init__(
        self, address: str, site: str, token: str, tls: ClientTLS | None, folder: Path | None = None
    ) -> None:
        self.address, self.token, self.folder = address, token, folder
        options = [
            *OPTIONS.items(),
            ("grpc.max_receive_message_length", MOST_FRAME),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        self.channel = open_channel(address, tls, options)
        self.metadata = [("site-bin", site.encode()), ("token-bin", token.encode())]
        self.closed = threading.Event()
        self.refused = False
        """The server does not take this site for the one that it has called, or not any more."""

    def connects(self) -> bool:
        """Whether the server can be reached, with a certificate that this site trusts."""
        try:
            grpc.channel_ready_future(self.channel).result(CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            return False
        return True

    def close(self) -> None:
        """End all calls; from any thread."""
        self.closed.set()
        self.channel.close()

    def answer_messages(self, service: Service) -> None:
        """Answer what the server has for this site, until it has no more or the connection is lost for good."""
        try:
            while True:
                id, answer = self._retried(self._fetch, service)
                self._retried(self._deliver, id, answer)
                del answer  # the next message brings as much again
                give_back()
        except Over:
            pass
        finally:
            self.close()

    def _fetch(self, service: Service) -> tuple[str, TensorFile]:
        """The next message, answered."""
        received = self.channel.stream_stream(f"/{SERVICE}/{FETCH}")(iter(()), metadata=self.metadata)
        if (first := next(received, None)) is None:
            raise Over
        header = read_header(first)
        reader, began = Reader(header.size, service.admit, self.folder), time.monotonic()
        try:
            message = read_frames(reader, received)
        except grpc.RpcError:
            raise
        except Exception as error:
            received.cancel()
            return header.id, service.refuse(reader.metadata.get("run", ""), error)
        del reader
        _log("received", header.size, began)
        return header.id, service.answer(message)

    def _deliver(self, id: str, answer: TensorFile) -> None:
        call, began = self.channel.stream_unary(f"/{SERVICE}/{DELIVER}"), time.monotonic()
        if call(frames(id, answer), metadata=self.metadata) == LATE:
            LOG.warning("an answer was not taken: the server does not wait for it any more")
        else:
            _log("sent", len(answer), began)

    def _retried(self, call: Any, *arguments: Any) -> Any:
        """What a call returns, once the connection holds.

        Raises:
            Over: the server does not know this site any more, or could not be reached for too long.
        """
        until = time.monotonic() + RETRY_SECONDS
        while True:
            began = time.monotonic()
            try:
                if self.closed.is_set():
                    raise Over
                return call(*arguments)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
                code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.CANCELLED
                if code == grpc.StatusCode.UNAUTHENTICATED:
                    self.refused = True
                    raise Over from None
                if time.monotonic() - began > RETRY_SECONDS / 2:  # it had held
                    until = time.monotonic() + RETRY_SECONDS
                if self.closed.wait(PAUSE_SECONDS) or time.monotonic() > until:
                    raise Over from None


def _log(what: str, size: int, began: float) -> None:
    LOG.info("%s %.3f MB in %.2f s", what, size / 1e6, time.monotonic() - began)


class Desk:
    """Takes the server's calls, which come through Flower, and keeps the connection to the run that called last.

    Args:
        host: the server's.
        site: the site's name.
        tls: see :class:`MessageClient`.
        stop: set when the program ends.
        folder: see :class:`MessageClient`.
        tell: receives why a call could not be followed.
    """

    def __init__(
        self,
        host: str,
        site: str,
        tls: ClientTLS | None,
        stop: threading.Event,
        folder: Path | None = None,
        tell: Callable[[SiteEvent], None] = lambda event: None,
    ) -> None:
        self.host, self.site, self.tls, self.stop, self.folder, self.tell = host, site, tls, stop, folder, tell
        self.called = threading.Condition()
        self.client: MessageClient | None = None

    def take_call(self, call: bytes) -> bytes:
        """Connect to the run that calls; returns nothing, or why not. An empty call asks for the site's name."""
        if not call:
            return self.site.encode()
        try:
            header = CallHeader.model_validate_json(call)
        except ValidationError:
            return b"does not understand the server's call; both must run the same version of FedStrata"
        address = join_address(self.host, header.port)
        with self.called:
            client = self.client
            if client and (client.address, client.token) == (address, header.token):
                if client.refused:
                    return self._cannot(
                        f"is not let in at {address} as {self.site!r}: there its key, or its certificate, "
                        "belongs to another name (name in site.toml)"
                    )
                if not client.closed.is_set():
                    return b""
        client = MessageClient(address, self.site, header.token, self.tls, self.folder)
        if not client.connects():
            client.close()
            return self._cannot(
                f"cannot connect to {address} (message_port in server.toml): a firewall, or another certificate"
            )
        with self.called:
            if self.client:
                self.client.close()
            self.client = client
            self.called.notify_all()
        return b""

    def _cannot(self, why: str) -> bytes:
        LOG.error("%s", why)
        self.tell(Declined("", why))
        return why.encode()

    def clients(self) -> Iterator[MessageClient]:
        """The connection to each run that calls, one after another, until the program ends."""
        while not self.stop.is_set():
            with self.called:
                self.called.wait_for(lambda: self.client and not self.client.closed.is_set(), 0.5)
                client = self.client
            if client and not client.closed.is_set():
                yield client
