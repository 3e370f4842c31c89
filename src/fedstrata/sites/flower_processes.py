"""Flower's processes: the commands that start them, what their logs mean, and the code that runs inside them.

Flower 1.41 answers sites, users and its own helpers on one port. Other machines reach only what is for sites, see
:class:`ControlGate`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError
from fedstrata.sites.checks import loopback
from fedstrata.sites.control_secret import HEADER, Signatures

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_VERBOSITY": "ERROR",
}
"""Environment of every process that imports Flower: no telemetry, nothing is installed."""


MOST_LOG = 10_000_000
"""Bytes of a log: whoever reaches the server's port has it write lines, without a key and as long as he likes."""
SECRET_OPTION = "--superexec-auth-secret-file"


def prepare_flower() -> None:
    """Set the environment for Flower; to be called before it is imported.

    Raises:
        UserError: Flower is not installed.
    """
    os.environ.update(QUIET)
    if importlib.util.find_spec("flwr") is None:
        raise UserError("engine flower: needs the extra 'flower': pip install 'fedstrata[flower]'")


def superlink(bind: str, port: int, tls: tuple[Path, Path, Path] | None, secret: Path) -> list[str]:
    """The command that starts a SuperLink.

    Args:
        bind: address to listen on.
        port: for sites, and on this machine for runs.
        tls: CA, certificate and key; None for plain text and sites without keys.
        secret: file with the secret by which a run, and whoever registers sites, identifies itself.
    """
    options = ["--insecure"]
    if tls:
        ca, certificate, key = map(str, tls)
        options = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        options += ["--enable-supernode-auth"]
    options += ["--isolation", "process", "--host", bind, "--port", str(port)]
    return _command("superlink", [*options, SECRET_OPTION, str(secret)])


def supernode(server: str, port: int, tls: tuple[Path, Path] | None, secret: Path) -> list[str]:
    """The command that starts a SuperNode.

    Args:
        server: ``host:port`` of the SuperLink.
        port: on this machine, for the site's own process.
        tls: CA of the server, private key of the site; None for plain text.
        secret: file with the secret by which the site's own process identifies itself.
    """
    options = ["--insecure"]
    if tls:
        options = ["--root-certificates", str(tls[0]), "--auth-supernode-private-key", str(tls[1])]
    options += ["--superlink", server, "--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    return _command("supernode", [*options, SECRET_OPTION, str(secret)])


def failure_reason(log: str) -> str:
    """Why a process ended, according to its log."""
    for sign, reason in REASONS.items():
        if sign in log:
            return reason
    lines = [line.strip() for line in log.splitlines() if "ERROR" in line]
    return re.sub(r"\x1b\[\d+m", "", lines[-1]) if lines else "the connection was lost"


def tail(log: Path) -> str:
    """The end of a log; nothing where it was moved away, as programs do that keep logs short."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4000))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def shorten(log: Path) -> None:
    """Begin a log that has become long anew, with its end; the whole is then in the file beside it.

    Its process goes on, and adds to it.
    """
    with suppress(OSError):
        if log.stat().st_size > MOST_LOG:
            end = tail(log)
            with suppress(OSError):  # as on a full disk, which has room again without the log
                shutil.copyfile(log, log.with_suffix(".old.log"))
            os.truncate(log, 0)
            with log.open("a", encoding="utf-8") as file:
                file.write(end)


REASONS = {
    "certificate has expired": "by this machine's clock the server's certificate has expired",
    "certificate is not yet valid": "by this machine's clock the server's certificate is not valid yet",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by this site's ca, or is another host's",
    "[code: 2004]": "the server does not accept this site: its key is not registered there, or another "
    "fedstrata join is connected with it, or the site was within the last minute",
    "WRONG_VERSION_NUMBER": "the server speaks plain text, this site TLS",
    "address already in use": "its port is taken",
    "SuperNode terminated gracefully": "the server does not take this site's signature, or has ended",
}
"""Text in Flower's logs -> what it means."""
CONNECTED = "SuperNode ID:"
"""Appears in the log of a SuperNode that the server has accepted."""
LOST, BACK = "Connection attempt failed, retrying", "Connection successful after"
"""Appear in it when the server does not answer a call, and when it does again."""


def _command(program: str, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "fedstrata.sites.flower_processes", str(os.getpid()), program, *options]


FLEET = re.compile(r"/v1/fleet/[\w-]+")
"""Paths for sites; Flower requires the signature of a registered key for each call."""


RUNTIME = re.compile(r"/v1/runtime/[\w-]+")
"""Paths for runs; Flower requires its secret for a task, and the task's token for every other call."""
MOST_BODY = 1 << 20
"""Bytes of a call of the control API, at most; what starts a run has about 1,000."""
MOST_SITE_BODY = 4096
"""Bytes of a site's call, at most; honest ones have up to 500, or 1,000 where a site says why it cannot come.
Of an answer Flower keeps in memory as many pieces as its body can name."""


class ControlGate:
    """Stands before Flower's SuperLink and decides who reaches what.

    Other machines reach what is for sites, this one the calls of a run too, and who has the secret all the rest.
    Flower's control API has no authentication of its own: whoever reaches it may register a site or start a run.

    Args:
        app: Flower's.
        secret: with which calls are signed, see :func:`fedstrata.sites.control_secret.sign`.
    """

    def __init__(self, app: Any, secret: bytes) -> None:
        self.app, self.signatures = app, Signatures(secret)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 403, or pass the call on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":  # Flower has none
            await send({"type": "websocket.close"})
        elif FLEET.fullmatch(scope["path"]):
            if _is_long(scope):
                await _refuse(send, b"only what is short")
            else:
                await self.app(scope, receive, send)
        elif not _is_local(scope):
            await _refuse(send, b"only from the server's own machine")
        elif RUNTIME.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
        else:
            header = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
            body = await _body(receive) if header else None
            if body is None or not self.signatures.accept(header, scope["path"], body):
                await _refuse(send, b"only with the secret of the user that runs fedstrata serve")
            else:
                await self.app(scope, _again(body, receive), send)


def _is_long(scope: Mapping[str, Any]) -> bool:
    """Whether a call has more bytes than one of a site's, or does not say before how many it has."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length) > MOST_SITE_BODY


async def _refuse(send: Any, reason: bytes) -> None:
    await send({"type": "http.response.start", "status": 403, "headers": []})
    await send({"type": "http.response.body", "body": reason})


async def _body(receive: Any) -> bytes | None:
    """The whole body of a call; None if it is too long, or the caller went away."""
    body = b""
    while len(body) <= MOST_BODY:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body if len(body) <= MOST_BODY else None
    return None


def _again(body: bytes, receive: Any) -> Any:
    """Gives a body that was read to whoever reads it next."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return left.pop() if left else await receive()

    return read


def _is_local(scope: Mapping[str, Any]) -> bool:
    """Whether the client is on this machine: its address is loopback, or the one that it connected to."""
    client = (scope.get("client") or ("",))[0]
    return loopback(client) or client == (scope.get("server") or (None,))[0]


class AdaptivePoll:
    """Takes the place of ``time`` in a SuperNode, which polls every 3 seconds: more often while messages come."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for a twentieth of the time since the last message: at least 0.2 s, at most ``seconds``."""
        if seconds != IDLE_SECONDS:
            self.last = time.monotonic()
        time.sleep(min(seconds, max(0.2, (time.monotonic() - self.last) / 20)))


IDLE_SECONDS = 3
"""For which a SuperNode sleeps between two polls; its other sleeps are shorter."""


def _main(parent: str, program: str, *options: str) -> None:
    """Run a SuperLink or a SuperNode for as long as the parent process lives."""
    prepare_flower()
    from flwr.supercore.app_utils import start_parent_process_monitor

    start_parent_process_monitor(int(parent))
    sys.argv = [f"flower-{program}", *options]
    if program == "superlink":
        from flwr.superlink import extensions
        from flwr.superlink.cli import flower_superlink
        from starlette.middleware import Middleware

        from fedstrata.sites.listening import more_files

        more_files()  # connections that say nothing stay open
        secret = Path(options[options.index(SECRET_OPTION) + 1]).read_bytes()
        extensions.get_middleware = lambda: (Middleware(ControlGate, secret=secret),)
        flower_superlink()
    else:
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode

        start_client_internal.time = AdaptivePoll()
        flower_supernode()
        os._exit(1)  # it has given up, as after a broken handshake; a thread of Flower's would keep the process


if __name__ == "__main__":
    _main(*sys.argv[1:])
