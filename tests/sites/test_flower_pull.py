"""Answers of sites to calls through Flower: what is long is refused before it is read."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedstrata import UserError
from fedstrata.sites import flower, flower_pull
from fedstrata.sites.flower_processes import MOST_SITE_BODY, ControlGate

import httpx  # isort: skip  (flower says first what is needed for it)
from flwr.app import Array, ArrayRecord, Message, RecordDict  # isort: skip
from flwr.common.serde import message_to_proto  # isort: skip
from flwr.app.message import remove_content_from_message  # isort: skip
from flwr.proto import fleet_pb2, message_pb2, node_pb2, runtime_pb2  # isort: skip
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # isort: skip
from flwr.supercore.runtime import RuntimeHttpClient  # isort: skip
from flwr.supercore.task_identity import TaskIdentity  # isort: skip


@pytest.fixture(autouse=True)
def _a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Body(httpx.SyncByteStream):
    """A body that counts what is read of it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.read_bytes = content, 0

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.content), 1000):
            self.read_bytes += 1000
            yield self.content[start : start + 1000]


class SuperLink:
    """Holds one answer, whatever is in it, and hands it out as Flower's does."""

    def __init__(self, content: RecordDict, tree: Any = None) -> None:
        message = Message(content, 1, "train", ttl=60)
        self.root = message.object_id
        message.metadata.__dict__["_message_id"] = self.root
        self.objects = {id: item.deflate() for id, item in get_all_nested_objects(message).items()}
        self.tree = get_object_tree(message)
        self.message = message_to_proto(remove_content_from_message(message))
        self.forgotten: list[str] = []
        self.bodies: list[Body] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        found: Any
        if request.url.path.endswith("pull-messages"):
            found = runtime_pb2.PullAppMessagesResponse(
                messages_list=[self.message], message_object_trees=[self.tree]
            )
        elif request.url.path.endswith("pull-object"):
            asked = message_pb2.PullObjectRequest.FromString(request.content)
            content = self.objects[asked.object_id]
            found = message_pb2.PullObjectResponse(
                object_found=True, object_available=True, object_content=content
            )
        else:
            asked = message_pb2.ConfirmMessageReceivedRequest.FromString(request.content)
            self.forgotten.append(asked.message_object_id)
            found = message_pb2.ConfirmMessageReceivedResponse()
        body = found.SerializeToString()
        self.bodies.append(Body(body))
        return httpx.Response(200, headers={"content-length": str(len(body))}, stream=self.bodies[-1])

    def pulled(self) -> list[bytes | None]:
        client = RuntimeHttpClient("http://127.0.0.1:1")
        client._client = httpx.Client(transport=httpx.MockTransport(self.answer))
        grid = SimpleNamespace(
            _runtime_client=client, node=node_pb2.Node(node_id=1), run=SimpleNamespace(run_id=1)
        )
        flower_pull.bound(grid)
        return list(flower_pull.pull(grid, "asked"))


def record(content: bytes) -> RecordDict:
    return flower._record(content)


@pytest.mark.parametrize("content", [b"", b"clinic-7", b"x" * 2000])
def test_a_short_answer_is_taken(content: bytes) -> None:
    link = SuperLink(record(content))
    assert link.pulled() == [content]
    assert link.forgotten == [link.root]


@pytest.mark.parametrize("size", [flower_pull.MOST_BYTES, 1_000_000, 30_000_000])
def test_a_long_answer_is_refused_before_it_is_read(size: int) -> None:
    link = SuperLink(record(bytes(size)))
    assert link.pulled() == [flower_pull.TOO_LONG]
    assert sum(body.read_bytes for body in link.bodies) < 30_000
    assert link.forgotten == [link.root], "Flower would keep it until the run ends"


def test_an_answer_of_many_pieces_is_refused() -> None:
    many = RecordDict({f"{i}": ArrayRecord({"a": Array("uint8", (1,), "b", bytes([i]))}) for i in range(8)})
    link = SuperLink(many)
    assert link.pulled() == [flower_pull.TOO_LONG]
    assert len(link.bodies) == 2, "no piece is asked for"
    assert link.forgotten == [link.root]


def test_an_answer_that_names_a_piece_many_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 100)
    link = SuperLink(record(bytes(5000)))
    assert len(link.objects) < 7
    assert link.pulled() == [flower_pull.TOO_LONG]


def test_an_answer_whose_message_is_long_is_refused() -> None:
    link = SuperLink(record(b"x"))
    link.message.metadata.group_id = "g" * 1_000_000
    assert link.pulled() == [flower_pull.TOO_LONG]


def test_nonsense_in_place_of_an_answer_is_none() -> None:
    link = SuperLink(record(b"x"))
    link.objects[link.root] = b"nonsense"
    assert link.pulled() == [None]
    assert link.forgotten == [link.root]


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ([(b"content-length", b"%d" % MOST_SITE_BODY)], True),
        ([(b"content-length", b"%d" % (MOST_SITE_BODY + 1))], False),
        ([(b"content-length", b"400000000")], False),
        ([(b"transfer-encoding", b"chunked")], False),
    ],
)
def test_the_server_takes_nothing_long_of_a_site_through_flower(
    headers: list[tuple[bytes, bytes]], passes: bool
) -> None:
    reached, sent = through_the_gate("/v1/fleet/push-object", headers)
    assert bool(reached) == passes
    assert passes or sent[0]["status"] == 403


def through_the_gate(path: str, headers: list[tuple[bytes, bytes]]) -> tuple[list[str], list[Any]]:
    """The paths of what comes to Flower of a call, and what is answered in its place."""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(ControlGate(app, b"5" * 64)(scope, None, send))
    return reached, sent


@pytest.mark.parametrize(("more", "passes"), [(0, True), (60, False), (1000, False)])
def test_one_answer_cannot_name_many_pieces_all_of_which_flower_would_keep(more: int, passes: bool) -> None:
    """In memory, until the run ends: 300 pieces of a MiB were taken in answer to one call."""
    link = SuperLink(record(b"cannot connect to the server's port " * 30))
    link.tree.children.extend(message_pb2.ObjectTree(object_id=f"{i:064x}") for i in range(more))
    request = fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=1), messages_list=[link.message], message_object_trees=[link.tree]
    )
    reached, _ = through_the_gate("/v1/fleet/push-messages", [(b"content-length", b"%d" % request.ByteSize())])
    assert bool(reached) == passes


def lost(*args: Any) -> Any:
    raise httpx.ConnectError("")


def test_a_lost_connection_is_in_the_record_of_the_run_in_a_sentence() -> None:
    client = SimpleNamespace(PullMessages=lost)
    grid = SimpleNamespace(get_nodes=lost, push_messages=lost, _runtime_client=client)
    transport = flower.FlowerTransport(grid, {b"key": "a"}, "127.0.0.1:9440")
    said = r"^federation: the server at 127.0.0.1:9440 does not answer \(ConnectError\); fedstrata serve starts it"
    for call in (
        transport.online,
        lambda: transport.send((1, ""), b"", 1.0),
        lambda: list(transport.receive(["asked"])),
    ):
        with pytest.raises(UserError, match=said):
            call()


def test_no_line_of_flowers_own_is_shown_where_another_library_shows_all() -> None:
    """As one of those by which noise is accounted for does."""
    shown, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(shown)
    root.addHandler(handler)
    try:
        logging.getLogger("flwr").error("[flwr-serverapp] Disconnected")
    finally:
        root.removeHandler(handler)
    assert shown.getvalue() == ""
