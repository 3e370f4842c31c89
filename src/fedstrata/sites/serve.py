"""The two long-running daemons: ``serve`` at the server, to which sites connect, and ``join`` at a site."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from fedstrata.errors import UserError
from fedstrata.events import SiteEvent, Worked
from fedstrata.sites.admission import Admission, watch
from fedstrata.sites.certificates import SERVER_THEN, SITE_THEN, Ending, check_server, check_site
from fedstrata.sites.checks import join_address, loopback
from fedstrata.sites.control_secret import read_secret, secret_file
from fedstrata.sites.flower_processes import tail
from fedstrata.sites.interruptible import interruptible
from fedstrata.sites.settings import ServerSettings, SiteSettings
from fedstrata.sites.site_log import log_to

if TYPE_CHECKING:
    from fedstrata.plan.messages import Request
    from fedstrata.sites.listening import ClientTLS
    from fedstrata.sites.site_run import ReachServer

LOG = logging.getLogger("fedstrata.site")
RESTART_SECONDS = 5.0
"""Before a process that ended is started again. Flower refuses a site for a minute after it was killed."""
STARTUP_SECONDS = 60.0
"""For a process to come up, and to go down."""
PRIVATE_UMASK = 0o077
"""Files of a federation are for its user alone."""
Say = Callable[[str], None]
"""Prints a line."""
Tell = Callable[[SiteEvent], None]
"""Receives what a site reports of its own work."""
Process = subprocess.Popen[bytes]


def serve(settings: ServerSettings, say: Say, insecure: bool = False, page: bool = False) -> None:
    """Run the server of a federation until interrupted.

    Args:
        settings: the server's.
        say: prints a line.
        insecure: without TLS and keys.
        page: show the live page on this machine.

    Raises:
        UserError: a port is taken, or Flower's server does not come up.
    """
    from fedstrata.sites import flower_processes

    flower_processes.prepare_flower()
    from fedstrata.sites.page_server import show_page
    from fedstrata.sites.registration import register, register_when_up

    _check_insecure(insecure, settings.host)
    if not insecure:
        check_server(settings)
    _check_port_free(settings.bind, settings.port)
    os.umask(PRIVATE_UMASK)
    tls = None if insecure else (settings.tls.ca, settings.tls.certificate, settings.tls.key)
    log = settings.home / "logs" / "superlink.log"
    secret = read_secret(settings.home)
    command = flower_processes.superlink(settings.bind, settings.port, tls, secret_file(settings.home))

    admission = Admission(settings, settings.home / "server.toml", say)
    stop = threading.Event()

    def wait_until_up(process: Process) -> None:
        register_when_up(admission, insecure, process, log, secret)
        server = join_address(settings.host, settings.port)
        say(f"serving at {server} for {', '.join(admission.keys())}; log {log}")

    def apply(keys: Mapping[str, Path]) -> None:
        register(join_address(settings.host, settings.port), settings.tls.ca.read_bytes(), keys, secret)

    ending = Ending(None if insecure else settings.tls.certificate, SERVER_THEN, say)
    shown = show_page(settings, insecure, secret, say) if page else nullcontext()
    with interruptible(stop), shown:
        try:
            if not insecure:
                threading.Thread(target=watch, args=(admission, apply, stop, say), daemon=True).start()
            _supervise(command, log, settings.home, stop, say, wait_until_up, lambda: ending)
        finally:
            stop.set()


def join(
    settings: SiteSettings,
    say: Say,
    insecure: bool = False,
    dry_run: bool = False,
    tell: Tell = lambda event: None,
) -> None:
    """Take part in a federation's runs as a site until interrupted.

    Args:
        settings: the site's.
        say: prints a line.
        insecure: without TLS and keys.
        dry_run: show what the next run would have the site send, answer nothing, and end.
        tell: receives events.

    Raises:
        UserError: the settings do not fit this machine, or what the site keeps is damaged.
    """
    import torch

    from fedstrata.sites import flower_processes
    from fedstrata.sites.own_rows import check_own_rows

    flower_processes.prepare_flower()
    _check_insecure(insecure, settings.host)
    if not insecure:
        check_site(settings)
    os.umask(PRIVATE_UMASK)
    if settings.device.threads:
        torch.set_num_threads(settings.device.threads)
    check_own_rows(settings)
    with _alone(settings.folder):
        _take_part(settings, say, insecure, dry_run, tell)


def _take_part(settings: SiteSettings, say: Say, insecure: bool, dry_run: bool, tell: Tell) -> None:
    from fedstrata.sites import flower, flower_processes, terminal
    from fedstrata.sites.connecting import Watch, await_connection, clock_complaint
    from fedstrata.sites.message_client import Desk
    from fedstrata.sites.service import SiteService
    from fedstrata.sites.trial import limit_own_memory, warm_up
    from fedstrata.sites.visit import Visit

    logs = settings.folder / "logs"
    log_to(logs / "site.log")
    secret, port = secret_file(settings.folder), _unused_port()
    tls = None if insecure else (settings.ca, settings.key)
    own = None if insecure else _client_tls(settings)
    command = flower_processes.supernode(settings.server, port, tls, secret)
    warm_up()
    limit_own_memory(settings.device.name)
    step = partial(_log_step, tell)
    service = SiteService(settings, step, _reach(settings, own), terminal.asking(say), tell=tell)
    visit = Visit(settings, say) if dry_run else None
    stop, log = threading.Event(), logs / "supernode.log"
    desk = Desk(settings.host, settings.name, own, stop, settings.folder, tell)
    calls = (f"127.0.0.1:{port}", desk.take_call, stop, secret.read_bytes())
    listener = threading.Thread(target=flower.answer_messages, args=calls, daemon=True)
    clock = partial(clock_complaint, settings.server, None if insecure else settings.ca)
    wait = partial(await_connection, settings.name, log, stop, say, clock, [])
    ending = Ending(None if insecure else settings.certificate, SITE_THEN, say)
    supervision = (command, log, settings.folder, stop, say, wait, partial(Watch, settings.name, log, say, ending))
    supervisor = threading.Thread(target=_supervise, args=supervision, daemon=True)
    say(f"{settings.name}: joins {settings.server}; logs {logs}")
    with interruptible(stop):
        try:
            supervisor.start()
            listener.start()
            for client in desk.clients():
                client.answer_messages(visit or service)
                if visit and visit.over:
                    break
        finally:
            stop.set()
            supervisor.join(STARTUP_SECONDS)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One program at a time works in a site's folder: two would write one release log."""
    lock = FileLock(folder / "join.lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: another fedstrata join works in this folder; end it first") from None
    except OSError as error:
        raise UserError(f"folder: {folder} cannot be made or written ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def _log_step(tell: Tell, step: int, steps: int, loss: float, seen: int) -> None:
    tell(Worked(step, steps, loss, seen))
    if step == steps or step % 50 == 0:
        LOG.info("step %d of %d, loss %.4f", step, steps, loss)


def _client_tls(settings: SiteSettings) -> ClientTLS:
    ca, certificate, key = settings.ca.read_bytes(), settings.certificate, settings.certificate_key
    return ca if certificate is None or key is None else (ca, key.read_bytes(), certificate.read_bytes())


def _reach(settings: SiteSettings, tls: ClientTLS | None) -> ReachServer:
    """Connects a request to the activation stream of the site's server, and of no other."""
    from fedstrata.sites.activation_client import ActivationClient

    def reach(request: Request, port: int, token: str, deadline: float) -> ActivationClient:
        return ActivationClient(join_address(settings.host, port), request, token, tls, deadline)

    return reach


def _supervise(
    command: Sequence[str],
    log: Path,
    home: Path,
    stop: threading.Event,
    say: Say,
    wait_until_up: Callable[[Process], None],
    watching: Callable[[], Callable[[], None]] = lambda: lambda: None,
) -> None:
    """Keep one of Flower's processes running until ``stop`` is set; its output goes to ``log``.

    Each one that is up is looked after by what ``watching`` returns, again and again. When this ends, for whatever
    reason, ``stop`` is set: a program that goes on without the process would only seem to be there. Why none comes
    up is said once, and not at every try.
    """
    from fedstrata.sites import flower_processes

    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "FLWR_HOME": str(home / "flower")}
    said = ""
    try:
        while not stop.is_set():
            try:
                process = _started(command, log, environment)
                try:
                    wait_until_up(process)
                    said = said if process.poll() is not None else ""
                    look = watching()
                    while process.poll() is None and not stop.wait(0.2):
                        flower_processes.shorten(log)
                        look()
                finally:
                    _end(process)
                reason = flower_processes.failure_reason(tail(log))
            except OSError as error:  # such as a folder that was moved away
                reason = f"{error.filename or log}: {error.strerror or error}"
            if not stop.is_set() and reason != said:
                say(f"{reason}; trying again in {RESTART_SECONDS:.0f} s")
            said = reason
            stop.wait(RESTART_SECONDS)
    finally:
        stop.set()


def _started(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """A process whose output goes to ``log``; what was there goes to a file beside it."""
    with suppress(FileNotFoundError):
        log.replace(log.with_suffix(".old.log"))
    with log.open("ab") as out:  # not to go on where it was when the log is shortened
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )


def _end(process: Process) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_insecure(insecure: bool, host: str) -> None:
    if insecure and not loopback(host):
        raise UserError(f"--insecure: is for one machine alone (host = '127.0.0.1'), and the server is {host}")


def _check_port_free(bind: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            raise UserError(f"serve: cannot listen on {join_address(bind, port)}: {error.strerror}") from None


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
