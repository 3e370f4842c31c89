"""Messages over gRPC: a site fetches what it is asked, and delivers its answers.

Both calls are the site's, so that no site has to be reached from elsewhere:

    fetch    the site waits; the server sends a header, the message in pieces, and a checksum
    deliver  the site sends a header, its answer in pieces, and a checksum; the server says that it has it

A site that is cut off while it fetches fetches the same message again, one that is cut off while it delivers
delivers again. A site is known by a token, which Flower has brought to it and to nobody else.

This module holds what both ends share; see :mod:`fedstrata.sites.message_server` and
:mod:`fedstrata.sites.message_client`.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash
from pydantic import ValidationError

from fedstrata.sites.headers import Header, Name, Port, Positive
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import PIECE, Reader, TensorFile

SERVICE, FETCH, DELIVER = "fedstrata.Messages", "fetch", "deliver"
TAKEN, LATE = b"taken", b"late"
"""What the server says of an answer: it has it, or nobody waits for it any more."""
MOST_FRAME = PIECE + 1024
"""Most bytes of a frame, which is a message of gRPC's."""


class FileHeader(Header):
    """The first frame.

    Attributes:
        id: of the message, or of the one that is answered.
        size: bytes of the message.
    """

    id: Name
    size: Positive


class CallHeader(Header):
    """What Flower brings to a site: a run has messages for it.

    Attributes:
        port: of the server.
        token: by which the server knows the site.
    """

    port: Port
    token: Name


def frames(id: str, file: TensorFile) -> Iterator[bytes]:
    """A message as it is sent; its checksum is the last frame."""
    yield FileHeader(id=id, size=len(file)).model_dump_json().encode()
    hashed = xxhash.xxh3_128()
    for piece in file.pieces():
        hashed.update(piece)
        yield piece
    yield hashed.digest()


def read_header(frame: bytes) -> FileHeader:
    """The first frame.

    Raises:
        WireError: it is none.
    """
    try:
        return FileHeader.model_validate_json(frame)
    except ValidationError:
        raise WireError("a message begins with something else") from None


def read_frames(reader: Reader, rest: Iterator[bytes]) -> TensorFile:
    """The message in the frames after the first.

    Raises:
        WireError: it is no message, is not admitted, or its checksum is wrong.
    """
    hashed, left = xxhash.xxh3_128(), reader.size
    while left:
        piece = next(rest, b"")
        if not 0 < len(piece) <= left:
            raise WireError(f"is not as long as the {reader.size} bytes announced")
        hashed.update(piece)
        reader.feed(piece)
        left -= len(piece)
    if next(rest, b"") != hashed.digest():
        raise WireError("is not what was sent: its checksum differs")
    return reader.finish()
