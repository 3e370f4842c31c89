"""What sites answer to calls through Flower: taken in small pieces, refused unread if long; a server that is away.

Flower's own ``pull_messages`` holds an answer of any length, several times over. An answer to a call is a site's
name, or a sentence, so little is needed of it; the parts of the model go another way.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from fedstrata.errors import UserError
from fedstrata.sites.flower_processes import prepare_flower

prepare_flower()

import httpx
from flwr.app import Message
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

LOG = logging.getLogger("fedstrata.server")
DISTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""In the text of an error of a connection to a server that was there, and could not prove who it is."""
RENEW = "once the files in tls/ are renewed restart fedstrata serve, which reads them when it starts"
"""What to do about that."""
MOST_BYTES = 4096
"""Of one of Flower's replies that hold something of a site's; the longest of an honest one's has about 1,000."""
MOST_OBJECTS = 16
"""Of which Flower makes a message; one of ours has 5."""
TOO_LONG = b"answers the server's call with more than a sentence"
"""Stands in place of an answer that is not read."""
PULLS = ("/v1/runtime/pull-messages", "/v1/runtime/pull-object")


class TooLong(Exception):
    """An answer is longer than any of ours."""


def bound(grid: Any) -> None:
    """Let a grid refuse Flower's replies to pulls by their length, before they are read."""
    grid._runtime_client._client.event_hooks = {"response": [_check_length]}


def pull(grid: Any, message_id: str) -> Iterator[bytes | None]:
    """The answer to a message, if it is there; None where Flower says that none will come, or it is none of ours.

    Args:
        grid: Flower's connection, see :func:`bound`.
        message_id: of the message.
    """
    client = grid._runtime_client
    try:
        found = client.PullMessages(runtime_pb2.PullAppMessagesRequest(message_ids=[message_id]))
    except TooLong:
        yield TOO_LONG
        return
    for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        root, run = message.metadata.message_id, grid.run.run_id
        try:
            yield _content(_inflated(grid, root, tree))
        except TooLong:
            yield TOO_LONG
        except httpx.HTTPError:
            raise
        except Exception as error:  # Flower's own, of whatever a site may send
            LOG.warning("an answer to a call cannot be read: %s", error)
            yield None
        client.ConfirmMessageReceived(  # so that Flower forgets it, read or not
            message_pb2.ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=root)
        )


def _inflated(grid: Any, root: str, tree: Any) -> Any:
    """The message with this id, of the objects in its tree."""
    ids = [node.object_id for node in islice(iterate_object_tree(tree), MOST_OBJECTS + 1)]
    if len(ids) > MOST_OBJECTS:
        raise TooLong
    fetch = make_pull_object_fn_protobuf(grid._runtime_client.PullObject, grid.node, grid.run.run_id)
    return inflate_object_from_contents(root, pull_objects(ids, fetch))


def _content(message: Message) -> bytes | None:
    if not message.has_content():
        return None
    record = message.content.array_records.get("message", {})
    content = bytes(record["bytes"].data) if "bytes" in record else b""
    if len(content) > MOST_BYTES:  # a piece of it may be named many times
        raise TooLong
    return content


def _check_length(response: httpx.Response) -> None:
    if response.is_success and response.request.url.path in PULLS:
        length = response.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            raise TooLong


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def answering(address: str) -> Iterator[None]:
    """Where a SuperLink is asked: that it does not answer is told in a sentence.

    Raises:
        UserError: the connection to it is lost, or it refuses.
    """
    try:
        yield
    except (httpx.HTTPError, ssl.SSLError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.FORBIDDEN:
            raise UserError(
                f"federation: the server at {address} refuses to start a run; start it on the machine, as the "
                "user and with the folder of fedstrata serve"
            ) from None
        if DISTRUSTED in (why := first_line(error)):
            raise UserError(
                f"federation: the certificate of the server at {address} does not hold ({why}); {RENEW}; "
                "--resume goes on from the last finished round"
            ) from None
        raise UserError(
            f"federation: the server at {address} does not answer ({why}); "
            "fedstrata serve starts it, and --resume goes on from the last finished round"
        ) from None
