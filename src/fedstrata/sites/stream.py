"""Split learning between machines: clients' batches pass through the server's layers over gRPC streams.

A session is one bidirectional stream, open for one client and one request. The client sends a message and waits
for the server's answer to it before it sends the next:

    the client                       the server
    begin     schedule of its steps  begin
    forward   hidden states          forward    hidden states
    backward  gradients              backward   gradients; then the layers' optimizer steps
    end                              end        the result of the session has been stored

``forward`` and ``backward`` come as often as ``begin`` said; a client that is scored sends ``forward`` alone, and
``end``. Each message is one safetensors file with a small checked header; its tensors are checked by
:mod:`fedstrata.wire.activations`. A stream that closes without ``end`` is canceled and has no effect.

This module holds what both ends share; see :mod:`fedstrata.sites.activation_server` and
:mod:`fedstrata.sites.activation_client`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import safetensors.torch

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.sites.headers import from_header, header_model, to_header
from fedstrata.sites.messages import DECODE_ERRORS, first_line
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import read_file

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if importlib.util.find_spec("grpc") is None:
    raise UserError("split learning between sites: needs the extra 'flower': pip install 'fedstrata[flower]'")

SERVICE, METHOD = "fedstrata.Layers", "session"
KEEPALIVE_SECONDS = 30
"""Between two pings on an idle connection, and for the answer to a ping."""
OPTIONS = {
    "grpc.keepalive_time_ms": KEEPALIVE_SECONDS * 1000,
    "grpc.keepalive_timeout_ms": KEEPALIVE_SECONDS * 1000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.min_ping_interval_without_data_ms": KEEPALIVE_SECONDS * 500,
}
"""Of every connection: while a client waits for its turn nothing but pings is sent."""
MOST_HEAD = 1 << 14
"""Bytes of a message's head; it names seven tensors at most."""


class SessionFailed(WireError):
    """A session that could not be completed."""


@dataclass(frozen=True)
class StreamHeader:
    """A message's header.

    Attributes:
        kind: what the message is.
        span: with ``begin`` the schedule of the client's steps, else None.
    """

    kind: Literal["begin", "forward", "backward", "end"]
    span: ScheduleSpan | None = None


def encode_stream_message(header: StreamHeader, tensors: Tensors) -> bytes:
    """The bytes of a message."""
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return bytes(safetensors.torch.save(contiguous, {"header": to_header(header).model_dump_json()}))


def decode_stream_message(message: bytes) -> tuple[StreamHeader, Tensors]:
    """The header and the tensors of a message; the tensors are still to be checked.

    Raises:
        WireError: it is no message of a session.
    """
    if int.from_bytes(message[:8], "little") > MOST_HEAD:
        raise WireError(f"not a message of a session: its head is longer than {MOST_HEAD} bytes")
    try:
        file = read_file(message)
        tensors, text = file.tensors, file.metadata["header"]
        header: StreamHeader = from_header(header_model(StreamHeader).model_validate_json(text))
    except DECODE_ERRORS as error:
        raise WireError(f"not a message of a session: {first_line(error)}") from None
    if (header.kind == "begin") != (header.span is not None) or (header.kind in ("begin", "end") and tensors):
        raise WireError(f"{header.kind}: a schedule goes with begin alone, tensors with neither begin nor end")
    return header, tensors


def session_name(request: Request) -> str:
    """Names what a stream answers, so that a late stream is not taken for that of the next request."""
    return f"{request.round} {request.phase}"
