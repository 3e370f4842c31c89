"""Flower, all of it: what carries messages between the server and the sites, whatever they hold.

A message is bytes and travels as one flat array. Both ends take the tasks that Flower gives out into a process of
their own: at the server that of the run, which has the loop; at a site the one that holds its rows and its model.
So no code is sent to a site, none is started for a message, and nothing is loaded twice.

Flower 1.41 answers sites, users and its own helpers on one port. Other machines reach only what is for sites, see
:class:`LoopbackOnlyMiddleware`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.errors import UserError
from fedstrata.sites.settings import loopback

if TYPE_CHECKING:
    from fedstrata.sites.engine import Presence

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_VERBOSITY": "ERROR",
}
"""Nothing phones home and nothing is installed: the environment of every process that imports Flower."""
os.environ.update(QUIET)

if importlib.util.find_spec("flwr") is None:
    raise UserError("engine flower: needs the extra 'flower': pip install 'fedstrata[flower]'")

import httpx
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

LOG = logging.getLogger("fedstrata.site")
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
"""What Flower wants as the app of a run. It holds no code: both ends bring their own."""
BEAT = 20
"""Seconds between two signs of life; Flower gives a task up after 60."""
PATIENCE = 60
"""Seconds for which a lost connection is tried again."""


class Transport:
    """The server's end: messages go to sites by name, answers come back by the message they answer.

    Attributes:
        names: public key -> the site's name; empty where sites have none, and tell their name when asked.
    """

    def __init__(self, grid: Any, names: Mapping[bytes, str]) -> None:
        self.grid, self.names = grid, names
        self.known: dict[Presence, str] = {}
        self.asked: dict[str, Presence] = {}
        self.ended = threading.Event()

    def online(self) -> dict[str, Presence]:
        """The sites that are there now: the number that Flower has for each, and since when."""
        self._check()
        there = {(node.node_id, node.last_activated_at): node.public_key for node in self.grid.get_nodes()}
        if self.names:
            return {self.names[key]: node for node, key in there.items() if key in self.names}
        for node in there.keys() - self.known.keys() - set(self.asked.values()):
            self.asked[self._push(node, b"", 60)] = node
        for reply in self.grid.pull_messages(list(self.asked)) if self.asked else ():
            node = self.asked.pop(reply.metadata.reply_to_message_id)
            if reply.has_content():
                self.known[node] = _bytes(reply).decode(errors="replace")
        return {name: node for node, name in self.known.items() if node in there}

    def send(self, to: Presence, message: bytes, seconds: float) -> str:
        """Send a message that is worth something for so long; returns its number, empty if it cannot be sent."""
        self._check()
        return self._push(to, message, seconds)

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """What has come in answer to these messages by now; None where Flower says that none will."""
        self._check()
        for number in list(numbers):  # one by one: only one answer is then in memory
            for reply in self.grid.pull_messages([number]):
                yield number, _bytes(reply) if reply.has_content() else None

    def _push(self, to: Presence, message: bytes, seconds: float) -> str:
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        [number] = self.grid.push_messages([Message(_record(message), to[0], "train", ttl=seconds)])
        return number or ""

    def _check(self) -> None:
        if self.ended.is_set():
            raise UserError("federation: Flower has ended this run; --resume goes on from the last finished round")


def _record(message: bytes) -> RecordDict:
    return RecordDict({"message": ArrayRecord({"bytes": Array("uint8", (len(message),), "bytes", message)})})


def _bytes(message: Message) -> bytes:
    """What a message holds, taken out of it; nothing where it is none of ours."""
    record = message.content.array_records.get("message", {})
    taken = bytes(record["bytes"].data) if "bytes" in record else b""
    message.content.clear()
    return taken


@contextmanager
def courier(address: str, ca: bytes | None, names: Mapping[bytes, str], secret: bytes) -> Iterator[Transport]:
    """A run of Flower's, as long as the context lasts.

    Args:
        address: ``host:port`` of the SuperLink.
        ca: of its certificate, PEM; None for plain text.
        names: see :class:`Transport`.
        secret: of the SuperLink, which only its own user knows.

    Raises:
        UserError: no SuperLink is there, or the connection to it is lost.
    """
    try:
        with _courier(address, ca, names, secret) as made:
            yield made
    except (httpx.HTTPError, ssl.SSLError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"federation: the server at {address} does not answer ({why}); "
            "fedstrata serve starts it, and --resume goes on from the last finished round"
        ) from None


@contextmanager
def _courier(address: str, ca: bytes | None, names: Mapping[bytes, str], secret: bytes) -> Iterator[Transport]:
    fab, _ = build_fab_from_files(APP)
    app = Fab(hashlib.sha256(fab).hexdigest(), fab, {})
    with _control(address, ca) as control:
        run = control.StartRun(StartRunRequest(fab=fab_to_proto(app), federation="")).run_id
    token = _claim(address, ca, run, secret)
    grid = HttpGrid(address, ca is None, ca, token=token)
    grid._retry_invoker = _retries()
    made = Transport(grid, names)
    task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
    grid.set_run(run_from_proto(task.run))
    beat = threading.Thread(target=_beat, args=(grid._runtime_client, made.ended), daemon=True)
    beat.start()
    outcome = SubStatus.FAILED
    try:
        yield made
        outcome = SubStatus.COMPLETED
    finally:
        made.ended.set()
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):
            grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=outcome, details=""))
        grid.close()


def _claim(address: str, ca: bytes | None, run: int, secret: bytes) -> str:
    """The token of a run's task at the server.

    Raises:
        UserError: Flower does not give the task out.
    """
    until = time.monotonic() + PATIENCE
    with _runtime(address, ca, secret=secret) as runtime:
        while time.monotonic() < until:
            got = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if got.token and got.task.run_id == run:
                return str(got.token)
            time.sleep(0.1)
    raise UserError(
        f"federation: the server at {address} gave the run no task within {PATIENCE} s; start it again"
    )


def public_key(path: Path) -> bytes:
    """A site's public key, as Flower compares it."""
    return bytes(try_load_public_key(path))


def register(address: str, ca: bytes | None, keys: Mapping[str, Path]) -> None:
    """Tell a SuperLink the sites: name -> public key. One that it knows already is left as it is.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    with _control(address, ca) as control:
        known = {node.public_key for node in control.ListNodes(ListNodesRequest()).nodes_info}
        for name, path in keys.items():
            if (key := public_key(path)) not in known:
                control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))


def attend(address: str, answer: Callable[[bytes], bytes], stop: threading.Event, secret: bytes) -> None:
    """A site's end: answer every message that the SuperNode at ``address`` takes in, until told to stop."""
    with _runtime(address, None, secret=secret) as runtime:
        while not stop.is_set():
            try:
                got = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            except httpx.HTTPError:
                stop.wait(1)
                continue
            if not got.token:
                stop.wait(0.1)
                continue
            try:
                _task(address, got.token, answer)
            except Exception:  # Flower tells the server that there is no answer; the next message may fare better
                LOG.exception("a message was not answered")


def _task(address: str, token: str, answer: Callable[[bytes], bytes]) -> None:
    done = threading.Event()
    with _runtime(address, None, token) as runtime:
        threading.Thread(target=_beat, args=(runtime, done), daemon=True).start()
        try:
            message, context, _, _ = pull_task_input(runtime)
            made = answer(_bytes(message))
            reply = Message(_record(made), reply_to=message)
            push_message(runtime, reply, context)
            push_task_output(runtime, context, SubStatus.COMPLETED, "")
        finally:
            done.set()


def _beat(runtime: RuntimeHttpClient, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(httpx.TransportError):
            try:
                if runtime.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                    continue
            except httpx.HTTPStatusError:
                pass
            ended.set()


def _runtime(
    address: str, ca: bytes | None, token: str | None = None, secret: bytes | None = None
) -> RuntimeHttpClient:
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="fedstrata")]
    if token:
        interceptors.append(RuntimeTokenHttpInterceptor(token))
    if secret:
        interceptors.append(
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            )
        )
    return RuntimeHttpClient.from_server_address(
        address, ca is None, ca, interceptors, retry_invoker=_retries() if token else None
    )


def _control(address: str, ca: bytes | None) -> ControlHttpClient:
    return ControlHttpClient.from_server_address(
        address, ca is None, ca, [RuntimeVersionHttpInterceptor(component_name="fedstrata")]
    )


def _retries() -> RetryInvoker:
    passing = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
    return RetryInvoker(
        wait_gen_factory=lambda: exponential(max_delay=5),
        recoverable_exceptions=(httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=PATIENCE,
        should_giveup=lambda e: isinstance(e, httpx.HTTPStatusError) and e.response.status_code not in passing,
    )


def superlink(bind: str, port: int, tls: tuple[Path, Path, Path] | None, secret: Path) -> list[str]:
    """The command that starts a SuperLink.

    Args:
        bind: address to listen on.
        port: for sites, and on this machine for runs.
        tls: CA, certificate and key; None for plain text and sites without keys.
        secret: file with the secret that a run must know.
    """
    options = ["--insecure"]
    if tls:
        ca, certificate, key = map(str, tls)
        options = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        options += ["--enable-supernode-auth"]
    options += ["--isolation", "process", "--host", bind, "--port", str(port)]
    return _command("superlink", [*options, "--superexec-auth-secret-file", str(secret)])


def supernode(server: str, port: int, tls: tuple[Path, Path] | None, secret: Path) -> list[str]:
    """The command that starts a SuperNode.

    Args:
        server: ``host:port`` of the SuperLink.
        port: on this machine, for the site's own process.
        tls: CA of the server, private key of the site; None for plain text.
        secret: file with the secret that this process must know.
    """
    options = ["--insecure"]
    if tls:
        options = ["--root-certificates", str(tls[0]), "--auth-supernode-private-key", str(tls[1])]
    options += ["--superlink", server, "--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    return _command("supernode", [*options, "--superexec-auth-secret-file", str(secret)])


def complaint(log: str) -> str:
    """What the log of a program that ended says of the reason."""
    for sign, words in REASONS.items():
        if sign in log:
            return words
    lines = [line.strip() for line in log.splitlines() if "ERROR" in line]
    return re.sub(r"\x1b\[\d+m", "", lines[-1]) if lines else "the connection was lost"


REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by this site's ca, or is another host's",
    "[code: 2004]": "the server does not take this site in: its key is not registered there, or the site was "
    "connected within the last minute",
    "WRONG_VERSION_NUMBER": "the server speaks plain text, this site TLS",
    "address already in use": "its port is taken",
}
"""Signs in Flower's logs, and what they mean."""
CONNECTED = "SuperNode ID:"
"""Stands in the log of a SuperNode that the server has taken in."""


def _command(what: str, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "fedstrata.sites.flower", str(os.getpid()), what, *options]


FLEET = re.compile(r"/v1/fleet/[\w-]+")
"""What is for sites; Flower asks each call there for the signature of a key that is registered."""


class LoopbackOnlyMiddleware:
    """Lets other machines reach what is for sites, and this one everything.

    Flower's control API asks nobody who they are: whoever reaches it may register a site or start a run.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 403, or pass on."""
        if scope["type"] == "http" and not FLEET.fullmatch(scope["path"]) and not _own(scope):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only from the server's own machine"})
        else:
            await self.app(scope, receive, send)


def _own(scope: Mapping[str, Any]) -> bool:
    """Whether who asks is on this machine: an address that only it has, or the one that was asked."""
    asks = (scope.get("client") or ("",))[0]
    return loopback(asks) or asks == (scope.get("server") or (None,))[0]


class AdaptivePoll:
    """The clock of a SuperNode, which looks for messages every 3 seconds: oftener, as long as there are some."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait: for a twentieth of the time since there was a message, from 0.2 s up to what it says."""
        if seconds != IDLE:
            self.last = time.monotonic()
        time.sleep(min(seconds, max(0.2, (time.monotonic() - self.last) / 20)))


IDLE = 3
"""What a SuperNode waits between two looks, seconds; where it waits for something else it is less."""


def _main(parent: str, what: str, *options: str) -> None:
    """Be a SuperLink or a SuperNode, as long as the process that wants one lives."""
    start_parent_process_monitor(int(parent))
    sys.argv = [f"flower-{what}", *options]
    if what == "superlink":
        from flwr.superlink import extensions
        from flwr.superlink.cli import flower_superlink
        from starlette.middleware import Middleware

        extensions.get_middleware = lambda: (Middleware(LoopbackOnlyMiddleware),)
        flower_superlink()
    else:
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode

        start_client_internal.time = AdaptivePoll()
        flower_supernode()


if __name__ == "__main__":
    _main(*sys.argv[1:])
