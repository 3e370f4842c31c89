"""Flower: which sites are there, proven by their keys, and the short messages that call them to a run.

A message is one flat array. Both ends take Flower's tasks into processes that they run anyway, so no code is sent
and nothing is loaded twice. The parts of the model go another way: :mod:`fedstrata.sites.message_stream`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.errors import UserError
from fedstrata.sites import flower_pull
from fedstrata.sites.control_client import control_client
from fedstrata.sites.flower_processes import prepare_flower
from fedstrata.sites.flower_pull import answering

if TYPE_CHECKING:
    from fedstrata.sites.engine import Presence

prepare_flower()

import httpx
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto import control_pb2, runtime_pb2
from flwr.supercore import interceptors
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

LOG = logging.getLogger("fedstrata.site")
logging.getLogger("flwr").propagate = False  # or its lines are shown where another library shows the root's
APP = {
    "pyproject.toml": b"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstrata-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedstrata"

[tool.flwr.app.components]
serverapp = "fedstrata_run:none"
clientapp = "fedstrata_run:none"
""",
    "fedstrata_run.py": b"none = None\n",
}
"""The app that Flower wants for a run. It holds no code: both ends bring their own."""
HEARTBEAT_SECONDS = 20
"""Between two heartbeats; Flower gives a task up after 60."""
RETRY_SECONDS = 60
"""For which a lost connection is retried."""


class FlowerTransport:
    """The server's end: sends messages to sites by name, matches answers to them by message id.

    Args:
        grid: Flower's connection.
        names: public key -> the site's name; empty where sites have no keys and are asked for their names.
        address: ``host:port`` of the SuperLink; a lost connection is told in a sentence where it is lost, so that
            the record of the run has the sentence too.
    """

    def __init__(self, grid: Any, names: Mapping[bytes, str], address: str) -> None:
        self.grid, self.names, self.address = grid, names, address
        self.known: dict[Presence, str] = {}
        self.name_requests: dict[str, Presence] = {}
        self.ended = threading.Event()

    def online(self) -> dict[str, Presence]:
        """The sites that are connected now: Flower's number for each, and since when."""
        self._check()
        with answering(self.address):
            online = {(node.node_id, node.last_activated_at): node.public_key for node in self.grid.get_nodes()}
        if self.names:
            return {self.names[key]: node for node, key in online.items() if key in self.names}
        for node in online.keys() - self.known.keys() - set(self.name_requests.values()):
            self.name_requests[self.send(node, b"", 60)] = node
        for message_id, answer in self.receive(self.name_requests):
            node = self.name_requests.pop(message_id)
            if answer is not None:
                self.known[node] = answer.decode(errors="replace")
        return {name: node for node, name in self.known.items() if node in online}

    def send(self, to: Presence, message: bytes, seconds: float) -> str:
        """Send a message that expires after so many seconds; returns its id, empty if it cannot be sent."""
        self._check()
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        with answering(self.address):
            [message_id] = self.grid.push_messages([Message(_record(message), to[0], "train", ttl=seconds)])
        return message_id or ""

    def receive(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """The answers to these messages that have arrived; None where Flower says that none will come."""
        self._check()
        for message_id in list(ids):  # one by one, so that only one answer is in memory
            with answering(self.address):
                answers = list(flower_pull.pull(self.grid, message_id))
            yield from ((message_id, answer) for answer in answers)

    def _check(self) -> None:
        if self.ended.is_set():
            raise UserError("federation: Flower has ended this run; --resume goes on from the last finished round")


def _record(message: bytes) -> RecordDict:
    return RecordDict({"message": ArrayRecord({"bytes": Array("uint8", (len(message),), "bytes", message)})})


def _take_bytes(message: Message) -> bytes:
    """The content of a message, removed from it to free memory; empty where it is none of ours."""
    record = message.content.array_records.get("message", {})
    content = bytes(record["bytes"].data) if "bytes" in record else b""
    message.content.clear()
    return content


@contextmanager
def connect(
    address: str, ca: bytes | None, names: Mapping[bytes, str], secret: bytes
) -> Iterator[FlowerTransport]:
    """A transport over a new run of Flower's; the run ends with the context.

    Args:
        address: ``host:port`` of the SuperLink.
        ca: certificate (PEM) of the CA that signed its own; None for plain text.
        names: see :class:`FlowerTransport`.
        secret: the SuperLink's, which only its own user knows.

    Raises:
        UserError: no SuperLink is there, or the connection to it is lost.
    """
    with answering(address), _flower_run(address, ca, names, secret) as transport:
        yield transport


@contextmanager
def _flower_run(
    address: str, ca: bytes | None, names: Mapping[bytes, str], secret: bytes
) -> Iterator[FlowerTransport]:
    fab, _ = build_fab_from_files(APP)
    app = Fab(hashlib.sha256(fab).hexdigest(), fab, {})
    with control_client(address, ca, secret) as control:
        run = control.StartRun(control_pb2.StartRunRequest(fab=fab_to_proto(app), federation="")).run_id
    token = _acquire_task(address, ca, run, secret)
    grid = HttpGrid(address, ca is None, ca, token=token)
    grid._retry_invoker = _retries()
    flower_pull.bound(grid)
    transport = FlowerTransport(grid, names, address)
    task = grid._runtime_client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
    grid.set_run(run_from_proto(task.run))
    threading.Thread(target=_heartbeat, args=(grid._runtime_client, transport.ended), daemon=True).start()
    outcome = SubStatus.FAILED
    try:
        yield transport
        outcome = SubStatus.COMPLETED
    finally:
        transport.ended.set()
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):
            grid._runtime_client.PushTaskOutput(runtime_pb2.PushTaskOutputRequest(sub_status=outcome, details=""))
        grid.close()


def _acquire_task(address: str, ca: bytes | None, run: int, secret: bytes) -> str:
    """The token of a run's task at the server.

    Raises:
        UserError: Flower does not hand out the task.
    """
    until = time.monotonic() + RETRY_SECONDS
    with _runtime(address, ca, secret=secret) as runtime:
        while time.monotonic() < until:
            acquired = runtime.AcquireTask(
                runtime_pb2.AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            )
            if acquired.token and acquired.task.run_id == run:
                return str(acquired.token)
            time.sleep(0.1)
    raise UserError(f"federation: server {address} gave the run no task within {RETRY_SECONDS} s; start it again")


def public_key(path: Path) -> bytes:
    """A site's public key in the form in which Flower compares it."""
    return bytes(try_load_public_key(path))


def answer_messages(address: str, answer: Callable[[bytes], bytes], stop: threading.Event, secret: bytes) -> None:
    """A site's end: answer every message that the SuperNode at ``address`` receives, until ``stop`` is set."""
    with _runtime(address, None, secret=secret) as runtime:
        while not stop.is_set():
            try:
                acquired = runtime.AcquireTask(
                    runtime_pb2.AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
                )
            except httpx.HTTPError:
                stop.wait(1)
                continue
            if not acquired.token:
                stop.wait(0.1)
                continue
            try:
                _answer_task(address, acquired.token, answer)
            except Exception:  # Flower tells the server that there is no answer; go on with the next message
                LOG.exception("a message was not answered")


def _answer_task(address: str, token: str, answer: Callable[[bytes], bytes]) -> None:
    done = threading.Event()
    with _runtime(address, None, token) as runtime:
        threading.Thread(target=_heartbeat, args=(runtime, done), daemon=True).start()
        try:
            message, context, _, _ = pull_task_input(runtime)
            reply = Message(_record(answer(_take_bytes(message))), reply_to=message)
            push_message(runtime, reply, context)
            push_task_output(runtime, context, SubStatus.COMPLETED, "")
        finally:
            done.set()


def _heartbeat(runtime: RuntimeHttpClient, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_SECONDS):
        with suppress(httpx.TransportError):
            try:
                if runtime.SendTaskHeartbeat(runtime_pb2.SendTaskHeartbeatRequest()).success:
                    continue
            except httpx.HTTPStatusError:
                pass
            ended.set()


def _runtime(
    address: str, ca: bytes | None, token: str | None = None, secret: bytes | None = None
) -> RuntimeHttpClient:
    chain: list[Any] = [interceptors.RuntimeVersionHttpInterceptor(component_name="fedstrata")]
    if token:
        chain.append(interceptors.RuntimeTokenHttpInterceptor(token))
    if secret:
        chain.append(
            interceptors.SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            )
        )
    return RuntimeHttpClient.from_server_address(
        address, ca is None, ca, chain, retry_invoker=_retries() if token else None
    )


def _retries() -> RetryInvoker:
    transient = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
    return RetryInvoker(
        wait_gen_factory=lambda: exponential(max_delay=5),
        recoverable_exceptions=(httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=RETRY_SECONDS,
        should_giveup=lambda e: isinstance(e, httpx.HTTPStatusError) and e.response.status_code not in transient,
    )
