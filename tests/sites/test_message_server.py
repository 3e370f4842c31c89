"""Messages over gRPC: a site that is cut off, a site that is hostile, a server that is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch

from fedstrata import UserError
from fedstrata.events import Declined, SiteEvent
from fedstrata.sites import message_client, transport
from fedstrata.sites.certificates import make_certificates
from fedstrata.sites.engine import Presence
from fedstrata.sites.message_client import Desk, MessageClient
from fedstrata.sites.message_server import MessageServer
from fedstrata.sites.message_stream import DELIVER, LATE, SERVICE, CallHeader, FileHeader, frames
from fedstrata.sites.transport import SiteTransport
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import TensorFile, pack

LONG = 120.0
"""Seconds, for what should not happen."""

TOKENS = {"a": "token of a", "b": "token of b"}
BIG = torch.arange(3_000_000, dtype=torch.float32)


def message(tensor: torch.Tensor = BIG, run: str = "r") -> TensorFile:
    return pack({"part|w": tensor}, {"kind": "request", "run": run})


class Doubles:
    """A service that doubles what it is sent, and takes at most ``limit`` bytes."""

    def __init__(self, limit: int = 2**40) -> None:
        self.limit = limit
        self.answered = 0

    def admit(self, metadata: Any, size: int) -> None:
        if size > self.limit:
            raise WireError("too much")

    def answer(self, asked: TensorFile) -> TensorFile:
        self.answered += 1
        return pack({name: 2 * tensor for name, tensor in asked.tensors.items()}, {"kind": "reply"})

    def refuse(self, run: str, error: Exception) -> TensorFile:
        return pack({}, {"kind": "refusal", "why": f"{run}: {error}"})


@pytest.fixture
def server() -> Iterator[MessageServer]:
    with MessageServer("127.0.0.1:0", None, TOKENS) as running:
        yield running


def client(server: MessageServer, name: str = "a", token: str | None = None) -> MessageClient:
    return MessageClient(f"127.0.0.1:{server.port}", name, token or TOKENS[name], None)


class Running:
    """A site's program, as far as its messages go."""

    def __init__(self, connection: MessageClient, service: Any) -> None:
        self.connection = connection
        self.thread = threading.Thread(target=connection.answer_messages, args=(service,), daemon=True)
        self.thread.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.thread.join(LONG)
        assert not self.thread.is_alive()


def taken_all(server: MessageServer, *ids: str) -> list[Any]:
    """The answers to these messages, in their order; others are thrown away."""
    found: dict[str, Any] = {}
    until = time.monotonic() + LONG
    while len(found) < len(ids):
        assert time.monotonic() < until, "no answer"
        server.wait(1)
        found |= dict(server.take(set(ids) - found.keys()))
    return [found[id] for id in ids]


def taken(server: MessageServer, id: str) -> Any:
    return taken_all(server, id)[0]


def test_messages_go_there_and_back(server: MessageServer) -> None:
    with Running(client(server), Doubles()), Running(client(server, "b"), Doubles()):
        for round in range(3):
            ids = [server.post(name, message(BIG + round), 60, 4 * BIG.numel()) for name in TOKENS]
            for answer in taken_all(server, *ids):
                assert torch.equal(answer.tensors["part|w"], 2 * (BIG + round))


def test_over_tls_with_the_servers_own_certificate_alone() -> None:
    ours, theirs = make_certificates("127.0.0.1"), make_certificates("127.0.0.1")
    with MessageServer("127.0.0.1:0", (ours.certificate, ours.key), TOKENS) as server:
        address = f"127.0.0.1:{server.port}"
        with Running(MessageClient(address, "a", TOKENS["a"], ours.ca), Doubles()):
            assert taken(server, server.post("a", message(), 60, 2**40)).metadata["kind"] == "reply"
        for ca in (theirs.ca, None):
            stranger = MessageClient(address, "a", TOKENS["a"], ca)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(message_client, "CONNECT_SECONDS", 1.0)
                assert not stranger.connects()
            stranger.close()


def test_a_port_that_is_taken_is_named(server: MessageServer) -> None:
    with pytest.raises(UserError, match=r"message_port: cannot listen on 127.0.0.1:\d+ for the messages of sites"):
        MessageServer(f"127.0.0.1:{server.port}", None, TOKENS)


@pytest.mark.parametrize(("name", "token"), [("a", "token of b"), ("c", "token of a"), ("a", "t")])
def test_whoever_has_no_token_gets_nothing(server: MessageServer, name: str, token: str) -> None:
    id = server.post("a", message(), 60, 2**40)
    stranger, service = client(server, name, token), Doubles()
    stranger.answer_messages(service)  # it ends by itself
    assert service.answered == 0
    with pytest.raises(grpc.RpcError, match="site or token is not known"):
        client(server, name, token)._deliver(id, message())
    assert server.absent_for("a") > 0


def test_a_site_that_opens_answers_without_a_word_takes_nobody_s_place(server: MessageServer) -> None:
    """Each of its calls ends the one before; else so few sites would fill the server."""
    metadata = [("site-bin", b"a"), ("token-bin", TOKENS["a"].encode())]
    silent, end = [], threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait()
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        deliver = channel.stream_unary(f"/{SERVICE}/{DELIVER}")
        for _ in range(80):
            silent.append(deliver.future(nothing(), metadata=metadata))
        sent = server.post("b", message(torch.ones(4)), 30, 100)
        with Running(client(server, "b"), Doubles()):
            assert taken(server, sent)
        deadline = time.monotonic() + LONG
        while sum(not call.done() for call in silent) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sum(not call.done() for call in silent) <= 1
        end.set()


@pytest.mark.skipif(sys.platform == "win32", reason="files are counted otherwise")
def test_a_server_may_have_as_many_files_open_as_the_machine_allows() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        with MessageServer("127.0.0.1:0", None, TOKENS):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_site_that_lost_a_message_fetches_it_again(server: MessageServer) -> None:
    id = server.post("a", message(), 60, 2**40)
    cut_off = client(server)
    stream = cut_off.channel.stream_stream("/fedstrata.Messages/fetch")(iter(()), metadata=cut_off.metadata)
    assert FileHeader.model_validate_json(next(stream)).id == id
    next(stream)
    cut_off.close()
    with Running(client(server), Doubles()):
        assert torch.equal(taken(server, id).tensors["part|w"], 2 * BIG)


def test_an_answer_to_a_message_that_was_replaced_is_nobodys(server: MessageServer) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(Doubles):
        def answer(self, asked: TensorFile) -> TensorFile:
            begun.set()
            assert go.wait(LONG)
            return super().answer(asked)

    with Running(client(server), Slow()):
        first = server.post("a", message(), 60, 2**40)
        assert begun.wait(LONG)
        replaced = server.post("a", message(torch.ones(4)), 60, 16)
        go.set()
        assert torch.equal(taken(server, replaced).tensors["part|w"], 2 * torch.ones(4))
        assert not list(server.take([first]))


def test_after_the_deadline_an_answer_is_not_read(server: MessageServer) -> None:
    id = server.post("a", message(), 0.01, 2**40)
    time.sleep(0.05)
    site = client(server)
    call = site.channel.stream_unary("/fedstrata.Messages/deliver")
    assert call(frames(id, message()), metadata=site.metadata) == LATE
    site.close()
    assert not list(server.take([id]))


def altered(sent: list[bytes]) -> list[bytes]:
    flipped = bytearray(sent[2])
    flipped[-1] ^= 1
    return [*sent[:2], bytes(flipped), *sent[3:]]


ATTACKS: list[tuple[Callable[[list[bytes]], list[bytes]], str]] = [
    (altered, "its checksum differs"),
    (lambda sent: sent[:-2], "is not as long as"),
    (lambda sent: sent[:2], "is not as long as"),
    (lambda sent: [*sent[:2], b"", *sent[2:]], "is not as long as"),
    (lambda sent: [sent[0], sent[1] * 2, *sent[2:]], "is not as long as"),
]


@pytest.mark.parametrize(("attack", "why"), ATTACKS)
def test_an_answer_that_is_not_what_was_sent_is_refused(
    server: MessageServer, attack: Callable[[list[bytes]], list[bytes]], why: str
) -> None:
    small = message(torch.ones(1000))
    id = server.post("a", small, 60, 4000)
    site = client(server)
    call = site.channel.stream_unary("/fedstrata.Messages/deliver")
    call(iter(attack(list(frames(id, small)))), metadata=site.metadata)
    site.close()
    answer = taken(server, id)
    assert isinstance(answer, WireError)
    assert why in str(answer)


def test_an_answer_takes_no_more_memory_than_was_agreed(
    server: MessageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = server.post("a", message(torch.ones(4)), 60, 16)
    allocated: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (allocated.append(a), empty(*a, **k))[1])
    client(server)._deliver(id, message(torch.ones(5)))
    answer = taken(server, id)
    assert isinstance(answer, WireError)
    assert str(answer) == "answers with tensors of 20 bytes, at most 16 were asked for"
    assert not allocated


def test_a_message_takes_no_more_memory_than_a_site_admits(server: MessageServer) -> None:
    with Running(client(server), Doubles(limit=100)):
        answer = taken(server, server.post("a", message(run="7"), 60, 2**40))
        assert answer.metadata == {"kind": "refusal", "why": "7: too much"}
        small = taken(server, server.post("a", message(torch.ones(4)), 60, 2**40))
        assert small.metadata["kind"] == "reply"


def test_a_site_that_stops_in_the_middle_does_not_stop_the_others_nor_the_end(server: MessageServer) -> None:
    go = threading.Event()

    def stalled(id: str) -> Iterator[bytes]:
        yield from list(frames(id, message()))[:3]
        go.wait(LONG)

    ids = {name: server.post(name, message(), 60, 2**40) for name in TOKENS}
    site = client(server)
    call = site.channel.stream_unary("/fedstrata.Messages/deliver")
    future = call.future(stalled(ids["a"]), metadata=site.metadata)
    with Running(client(server, "b"), Doubles()):
        assert taken(server, ids["b"]).metadata["kind"] == "reply"
    again = server.post("a", message(torch.ones(4)), 60, 16)
    with Running(client(server), Doubles()):
        assert taken(server, again).metadata["kind"] == "reply"
    go.set()
    assert future.exception(10) is not None, "its stream was canceled"
    site.close()


class Telephone:
    """Flower, as far as it is used here: sites that are there, and calls that they answer at once."""

    def __init__(self, desks: dict[str, Desk]) -> None:
        self.desks = desks
        self.answers: dict[str, bytes] = {}

    def online(self) -> dict[str, Presence]:
        return {name: (i, "") for i, name in enumerate(self.desks)}

    def send(self, to: Presence, call: bytes, seconds: float) -> str:
        id = str(len(self.answers))
        self.answers[id] = list(self.desks.values())[to[0]].take_call(call)
        return id

    def receive(self, ids: Any) -> Iterator[tuple[str, bytes | None]]:
        return iter([(id, self.answers[id]) for id in ids])


def test_a_site_comes_when_it_is_called_and_says_why_it_cannot(
    server: MessageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_client, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(transport, "GRACE_SECONDS", 0.0)
    stop = threading.Event()
    desks = {"a": Desk("127.0.0.1", "a", None, stop), "b": Desk("127.0.0.1", "b", b"", stop)}
    desks["b"].ca = make_certificates("127.0.0.1").ca  # it wants TLS, which is not there
    site = threading.Thread(
        target=lambda: [client.answer_messages(Doubles()) for client in desks["a"].clients()], daemon=True
    )
    site.start()
    carrier = SiteTransport(Telephone(desks), server, TOKENS)
    online = carrier.online()
    ids = {carrier.send(online[name], message(), 60, 2**40): name for name in TOKENS}
    answers: dict[str, Any] = {}
    until = time.monotonic() + LONG
    while len(answers) < 2 and time.monotonic() < until:
        answers |= {ids[id]: answer for id, answer in carrier.receive(ids)}
        carrier.wait(0.05)
    assert torch.equal(answers["a"].tensors["part|w"], 2 * BIG)
    why = f"cannot connect to 127.0.0.1:{server.port} (message_port in server.toml): a firewall, or another certi"
    assert str(answers["b"]).startswith(why)
    stop.set()
    server.close()
    site.join(10)
    assert not site.is_alive()


def test_a_site_under_another_name_is_told_so_and_not_waited_for(
    server: MessageServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder was copied, and of its site.toml the key alone was changed: both sides were silent for an hour."""
    monkeypatch.setattr(transport, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(transport, "CALL_SECONDS", 0.1)
    stop, told = threading.Event(), list[SiteEvent]()
    desk = Desk("127.0.0.1", "b", None, stop, tell=told.append)
    site = threading.Thread(target=lambda: [client.answer_messages(Doubles()) for client in desk.clients()])
    site.start()
    carrier = SiteTransport(Telephone({"a": desk}), server, TOKENS)
    id = carrier.send(carrier.online()["a"], message(), 60, 2**40)
    answers, until = dict[str, Any](), time.monotonic() + 20
    while not answers and time.monotonic() < until:
        answers |= carrier.receive([id])
        carrier.wait(0.05)
    stop.set()
    site.join(10)
    why = f"is not let in at 127.0.0.1:{server.port} as 'b': there its key, or its certificate, belongs to another"
    assert str(answers[id]).startswith(why)
    assert why in caplog.text
    assert told[0] == Declined("", str(answers[id]))


def test_a_site_says_its_name_and_takes_no_nonsense_for_a_call() -> None:
    desk = Desk("127.0.0.1", "a", None, threading.Event())
    assert desk.take_call(b"") == b"a"
    for nonsense in (b"\xff", b"{}", b'{"port": 0, "token": "t"}', b"[" * 10**5):
        assert desk.take_call(nonsense).startswith(b"does not understand")


def test_the_run_that_called_last_is_the_one_that_is_served(server: MessageServer) -> None:
    """A run that was killed and goes on calls anew: the site leaves the connection it has."""
    desk = Desk("127.0.0.1", "a", None, threading.Event())
    old = CallHeader(port=server.port, token="of a run that was killed").model_dump_json().encode()
    new = CallHeader(port=server.port, token=TOKENS["a"]).model_dump_json().encode()
    assert desk.take_call(old) == desk.take_call(new) == b""
    served = next(desk.clients())
    assert served.token == TOKENS["a"]
    assert desk.take_call(new) == b""
    assert next(desk.clients()) is served, "it is there already"
    served.close()
