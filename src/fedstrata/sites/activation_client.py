"""The client's end of split learning between machines: a link to layers on the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.sites.listening import ClientTLS, open_channel
from fedstrata.sites.stream import (
    METHOD,
    OPTIONS,
    SERVICE,
    SessionFailed,
    StreamHeader,
    decode_stream_message,
    encode_stream_message,
    session_name,
)
from fedstrata.wire.codec import WireError

import grpc  # isort: skip  (stream says first what is needed for it)

MAX_MESSAGE_BYTES = 2**30
"""Of a message that a client receives; the server's own bound is that of its job's batches."""


class ActivationClient:
    """The client's end: a :class:`fedstrata.models.cut.SplitLink` to layers on another machine, for one request.

    As a context it ends the session when the block does; left by an exception, it cancels the session.

    Args:
        address: "HOST:PORT" of the server.
        request: what the client has been asked.
        token: the token by which the server knows the client.
        tls: see :data:`fedstrata.sites.listening.ClientTLS`; None: plain text, for tests on one machine.
        deadline: seconds to wait for an answer, which includes the turns of other clients.

    Raises:
        SessionFailed: from every method, if the server refuses, does not answer or cannot be reached.
    """

    def __init__(self, address: str, request: Request, token: str, tls: ClientTLS | None, deadline: float) -> None:
        self.address, self.deadline = address, deadline
        options = [
            *OPTIONS.items(),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.channel = open_channel(address, tls, options)
        self.outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        metadata = [
            ("client-bin", request.client.encode()),
            ("token-bin", token.encode()),
            ("session", session_name(request)),
        ]
        call = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.stream = call(iter(self.outgoing.get, None), metadata=metadata)
        self.thread = ThreadPoolExecutor(1, "activation client")

    def __enter__(self) -> ActivationClient:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.cancel()

    def begin(self, span: ScheduleSpan) -> None:
        """Announce the schedule of the client's steps, before the first one."""
        self._exchange(StreamHeader("begin", span), {})

    def forward(self, message: Tensors) -> Tensors:
        """The layers' output for a batch's hidden states."""
        return self._exchange(StreamHeader("forward"), message)

    def backward(self, message: Tensors) -> Tensors:
        """The loss's gradient by the states sent, from that by the states received; then the layers step."""
        return self._exchange(StreamHeader("backward"), message)

    def close(self) -> None:
        """End the session: its result is stored at the server when this returns."""
        try:
            self._exchange(StreamHeader("end"), {})
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Close the stream; unless the session has ended, the server discards it."""
        self.outgoing.put(None)
        self.stream.cancel()
        self.channel.close()
        self.thread.shutdown()

    def _exchange(self, header: StreamHeader, message: Tensors) -> Tensors:
        """Send a message; returns the tensors of the answer, which are still to be checked."""
        self.outgoing.put(encode_stream_message(header, message))
        try:
            answer: bytes | None = self.thread.submit(next, self.stream, None).result(self.deadline)
            if answer is None:
                raise WireError("the stream has ended")
            received, tensors = decode_stream_message(answer)
            if received.kind != header.kind:
                raise WireError(f"it answered {received.kind}")
        except TimeoutError:
            raise SessionFailed(
                f"the server at {self.address} did not answer within {self.deadline:g} s"
            ) from None
        except grpc.RpcError as error:
            raise SessionFailed(f"the server at {self.address} {_reason(error)}") from None
        except WireError as error:
            raise SessionFailed(f"the server at {self.address} did not answer {header.kind}: {error}") from None
        return tensors


def _reason(error: Any) -> str:
    """Why a stream ended, as a sentence without its subject."""
    details = " ".join(str(error.details()).split())
    reasons = {
        grpc.StatusCode.CANCELLED: "canceled the session: the client was dropped, or silent for too long",
        grpc.StatusCode.UNAVAILABLE: f"cannot be reached: {details}",
    }
    return reasons.get(error.code(), f"refuses: {details}")
