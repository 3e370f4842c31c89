"""The server's end of messages: what each site is asked waits here until the site fetches it, then its answer."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.sites.listening import ServerTLS, caller, listen, more_files
from fedstrata.sites.message_stream import (
    DELIVER,
    FETCH,
    LATE,
    MOST_FRAME,
    SERVICE,
    TAKEN,
    frames,
    read_frames,
    read_header,
)
from fedstrata.sites.messages import Answer
from fedstrata.sites.stream import KEEPALIVE_SECONDS, OPTIONS
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import Reader, TensorFile

import grpc  # isort: skip  (stream says first what is needed for it)

STRANGERS = 50
"""Calls at once beyond those of the sites, which are refused as soon as they are heard."""


@dataclass(eq=False)
class Mailbox:
    """What the server and a site have under way: one message at most.

    Attributes:
        id: of the message; empty while there is none.
        message: what the site is asked.
        until: monotonic time after which nobody waits for the answer.
        answer_bytes: most bytes of tensors in the answer.
        fetched: the site has the message.
        answer: what came back.
        answered: it has.
        fetch: the stream on which the site waits or fetches.
        delivery: the stream on which the answer comes.
        knock: the newest stream of the site that has not said yet what it delivers; it may have one such.
        seen: monotonic time of the site's last call; 0 before the first.
    """

    id: str = ""
    message: TensorFile | None = None
    until: float = 0.0
    answer_bytes: int = 0
    fetched: bool = False
    answer: Answer = None
    answered: bool = False
    fetch: Any = None
    delivery: Any = None
    knock: Any = None
    seen: float = 0.0


class MessageServer:
    """The server's end, for one run.

    Args:
        address: "HOST:PORT" to listen on; port 0 takes an unused one.
        tls: see :func:`fedstrata.sites.listening.listen`; None: plain text, for tests on one machine.
        tokens: site -> the token by which it is known.
        folder: on whose disk large answers wait; None: they are in memory.

    Attributes:
        port: the port that it listens on.

    Raises:
        UserError: the address cannot be listened on.
    """

    def __init__(
        self, address: str, tls: ServerTLS | None, tokens: Mapping[str, str], folder: Path | None = None
    ) -> None:
        more_files()
        self.folder = folder
        self.tokens = {site: token.encode() for site, token in tokens.items()}
        self.boxes = {site: Mailbox() for site in tokens}
        self.changed = threading.Condition()
        self.closing = False
        most = 2 * len(tokens) + STRANGERS
        self.threads = ThreadPoolExecutor(most, "messages")
        options = {
            **OPTIONS,
            "grpc.http2.min_recv_ping_interval_without_data_ms": KEEPALIVE_SECONDS * 500,
            "grpc.max_receive_message_length": MOST_FRAME,
            "grpc.so_reuseport": 0,
        }
        self.server = grpc.server(self.threads, options=list(options.items()), maximum_concurrent_rpcs=most)
        handlers = {
            FETCH: grpc.stream_stream_rpc_method_handler(self._fetch),
            DELIVER: grpc.stream_unary_rpc_method_handler(self._deliver),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = listen(
            self.server, address, tls, "message_port: cannot listen on {address} for the messages of sites"
        )
        self.server.start()

    def __enter__(self) -> MessageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, site: str, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        """Leave a message for a site, in place of the one before; returns its id."""
        with self.changed:
            box = self.boxes[site]
            _cancel(box.delivery)
            box.delivery = None
            if box.fetch and box.message and not box.fetched:  # it is on its way
                _cancel(box.fetch)
                box.fetch = None
            box.id, box.message, box.answer_bytes = secrets.token_hex(8), message, answer_bytes
            box.until = time.monotonic() + seconds
            box.fetched, box.answer, box.answered = False, None, False
            self.changed.notify_all()
            return box.id

    def fail(self, site: str, why: str) -> None:
        """The site cannot come for its message, and has said why."""
        with self.changed:
            box = self.boxes[site]
            if box.message and not box.fetched:
                self._answer(box, WireError(why))

    def revoke(self, site: str, why: str) -> None:
        """The site is not admitted any more: its token is forgotten, and what it was asked has no other answer."""
        with self.changed:
            self.tokens.pop(site, None)
            box = self.boxes[site]
            for call in (box.fetch, box.delivery, box.knock):
                _cancel(call)
            box.fetch = box.delivery = box.knock = None
            if box.message and not box.answered:
                self._answer(box, WireError(why))

    def absent_for(self, site: str) -> float:
        """Seconds for which a site has not come for its message; 0 if it has it, or is there to fetch it."""
        with self.changed:
            box = self.boxes[site]
            if box.fetch or box.fetched or not box.message:
                return 0.0
            return time.monotonic() - box.seen

    def take(self, ids: Iterable[str]) -> Iterator[tuple[str, Answer]]:
        """The answers to these messages that have arrived, each of them once."""
        wanted = set(ids)
        for box in self.boxes.values():
            if box.answered:
                with self.changed:
                    id, answer = box.id, box.answer
                    box.id, box.answer, box.answered = "", None, False
                if id in wanted:
                    yield id, answer
                del answer

    def wait(self, seconds: float) -> None:
        """Wait so long, or until there is an answer to take."""
        with self.changed:
            self.changed.wait_for(lambda: any(box.answered for box in self.boxes.values()), seconds)

    def close(self) -> None:
        """End all calls and stop listening."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.server.stop(1).wait()
        self.threads.shutdown()

    def _site(self, call: Any) -> Mailbox:
        """Whose call this is."""
        return self.boxes[caller(call, "site", self.tokens)]

    def _fetch(self, _: Iterator[bytes], call: Any) -> Iterator[bytes]:
        """A site waits for its next message, and gets it. The newest call of a site is the one that counts.

        A site that fetches what it has fetched before has lost it.
        """
        box = self._site(call)
        with self.changed:
            _cancel(box.fetch)
            box.fetch, box.seen, box.fetched = call, time.monotonic(), box.answered
            if not call.add_callback(lambda: self._gone(box, call)):
                box.fetch = None
                return
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.closing or box.fetch is not call or _due(box))
            if self.closing or box.fetch is not call:
                return
            id, message = box.id, box.message
        assert message is not None
        yield from frames(id, message)
        with self.changed:
            if box.id == id and box.fetch is call:
                box.fetched = True

    def _gone(self, box: Mailbox, call: Any) -> None:
        with self.changed:
            if box.fetch is call:
                box.fetch, box.seen = None, time.monotonic()
                self.changed.notify_all()

    def _deliver(self, received: Iterator[bytes], call: Any) -> bytes:
        """A site's answer comes in. What nobody waits for is not read."""
        box, answer = self._site(call), None
        with self.changed:
            _cancel(box.knock)  # or one site could take the places of all others
            box.knock = call
        try:
            header = read_header(next(received, b""))
            with self.changed:
                if box.knock is not call:
                    return LATE
                box.knock = None
                if box.id != header.id or box.answered or time.monotonic() > box.until:
                    return LATE
                _cancel(box.delivery)
                box.delivery, limit = call, box.answer_bytes
            answer = self._read(header.size, limit, received)
        except (WireError, grpc.RpcError):
            return LATE
        finally:
            with self.changed:
                box.knock = None if box.knock is call else box.knock
                if box.delivery is call:
                    box.delivery, box.seen = None, time.monotonic()
                    if answer is not None:
                        self._answer(box, answer)
        return TAKEN

    def _read(self, size: int, limit: int, received: Iterator[bytes]) -> Answer:
        """An answer of so many bytes whose tensors may have ``limit``, or what is wrong with it."""

        def admit(metadata: Mapping[str, str], tensors: int) -> None:
            if tensors > limit:
                raise WireError(f"answers with tensors of {tensors} bytes, at most {limit} were asked for")

        try:
            return read_frames(Reader(size, admit, self.folder), received)
        except WireError as error:
            return error
        except OSError as error:
            return WireError(f"answers with {size} bytes, which cannot be kept at the server ({error.strerror})")

    def _answer(self, box: Mailbox, answer: Answer) -> None:
        box.answer, box.answered, box.message, box.fetched = answer, True, None, True
        self.changed.notify_all()


def _due(box: Mailbox) -> bool:
    return box.message is not None and time.monotonic() < box.until


def _cancel(call: Any) -> None:
    if call is not None:
        call.cancel()
