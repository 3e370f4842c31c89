"""Messages between this program and its own worker processes: pickles over a Unix socket, files by descriptor.

Nobody else can reach these sockets: they have no name and are handed from parent to child.
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct("!QB")
"""Bytes of the pickle, and descriptors that come with it."""


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message, and open files with it."""
    content = pickle.dumps(message, protocol=5)
    frame = memoryview(HEADER.pack(len(content), len(descriptors)) + content)  # one, so that it is read at once
    if descriptors:
        frame = frame[socket.send_fds(connection, [frame], list(descriptors)) :]
    if frame:  # even an empty send fails once the other end has read all and closed
        connection.sendall(frame)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message with its descriptors.

    Raises:
        EOFError: the other end is gone.
        OSError: this process may open no more files.
    """
    descriptors = array.array("i")
    try:
        content = _content(connection, descriptors)
    except (EOFError, OSError) as error:
        for descriptor in descriptors:  # else the memory behind it is never free again
            os.close(descriptor)
        if isinstance(error, ConnectionError):
            raise EOFError from None
        raise
    return pickle.loads(content), list(descriptors)


def _content(connection: socket.socket, descriptors: array.array[int]) -> bytearray:
    """The next message's pickle; its descriptors are added to ``descriptors`` as soon as they have come."""
    item = descriptors.itemsize
    header, ancillary, _, _ = connection.recvmsg(HEADER.size, socket.CMSG_SPACE(item * 8))
    if not header:
        raise EOFError
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % item])
    header += _exactly(connection, HEADER.size - len(header))
    size, count = HEADER.unpack(header)
    content = _exactly(connection, size)
    if len(descriptors) < count:  # the system drops what is too much, and says nothing
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return content


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content, done = bytearray(size), 0
    while done < size:
        got = connection.recv_into(memoryview(content)[done:])
        if not got:
            raise EOFError
        done += got
    return content
