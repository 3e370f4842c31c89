"""The two programs that stay: the server's, to which sites connect, and a site's, which takes part in runs."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.errors import UserError
from fedstrata.sites.settings import ServerSettings, SiteSettings, address, loopback

if TYPE_CHECKING:
    from fedstrata.plan.messages import Request
    from fedstrata.sites.service import Reach

LOG = logging.getLogger("fedstrata.site")
AGAIN = 5.0
"""Seconds before a program that ended is started again. Flower refuses a site for a minute after it was killed."""
PATIENCE = 60.0
"""Seconds for a program to come up, and to go down."""
PRIVATE = 0o077
"""Mask of the modes of files: what a federation keeps is for its user alone."""
Say = Callable[[str], None]
"""Prints a line."""


def serve(settings: ServerSettings, say: Say, insecure: bool = False) -> None:
    """Be the server of a federation until interrupted.

    Raises:
        UserError: a port is taken, or Flower's server does not come up.
    """
    import httpx

    from fedstrata.sites import flower

    _alone(insecure, settings.host)
    _free(settings.bind, settings.port)
    os.umask(PRIVATE)
    tls = None if insecure else (settings.tls.ca, settings.tls.certificate, settings.tls.key)
    ca = None if insecure else settings.tls.ca.read_bytes()
    at, logs = address(settings.host, settings.port), settings.home / "logs"
    command = flower.superlink(settings.bind, settings.port, tls, secret(settings.home))

    def come_up(process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                flower.register(at, ca, {} if insecure else settings.sites)
            except httpx.HTTPError as error:
                if process.poll() is not None or time.monotonic() > until:
                    why = flower.complaint(_tail(logs / "superlink.log"))
                    raise UserError(f"serve: Flower's server does not come up: {why} ({error})") from None
                time.sleep(0.2)
            else:
                say(f"serving at {at} for {', '.join(settings.sites)}; log {logs / 'superlink.log'}")
                return

    with _interruptible():
        _supervise(command, logs / "superlink.log", settings.home, threading.Event(), say, come_up)


def join(settings: SiteSettings, say: Say, insecure: bool = False) -> None:
    """Be a site of a federation until interrupted.

    Raises:
        UserError: the settings do not fit this machine.
    """
    import torch

    from fedstrata.sites import flower
    from fedstrata.sites.service import SiteService

    _alone(insecure, settings.host)
    os.umask(PRIVATE)
    if settings.device.threads:
        torch.set_num_threads(settings.device.threads)
    _check_rows(settings)
    logs = settings.folder / "logs"
    _log_to(logs / "site.log")
    key = secret(settings.folder)
    port = _any_port()
    tls = None if insecure else (settings.ca, settings.key)
    command = flower.supernode(settings.server, port, tls, key)
    ca = None if insecure else settings.ca.read_bytes()

    def told(step: int, steps: int, loss: float, seen: int) -> None:
        if step == steps or step % 50 == 0:
            LOG.info("step %d of %d, loss %.4f", step, steps, loss)

    host = SiteService(settings, told, _reach(settings, ca))
    stop = threading.Event()

    def come_up(process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        while process.poll() is None and not stop.wait(0.2):
            if flower.CONNECTED in _tail(logs / "supernode.log"):
                say(f"{settings.name}: connected")
                return
            if time.monotonic() - began > PATIENCE:
                say(f"{settings.name}: the server does not answer; {logs / 'supernode.log'}")
                began = time.monotonic()

    node = threading.Thread(
        target=_supervise, args=(command, logs / "supernode.log", settings.folder, stop, say, come_up), daemon=True
    )
    say(f"{settings.name}: joins {settings.server}; logs {logs}")
    with _interruptible():
        try:
            node.start()
            flower.attend(f"127.0.0.1:{port}", host.answer, stop, key.read_bytes())
        finally:
            stop.set()
            node.join(PATIENCE)


def _check_rows(settings: SiteSettings) -> None:
    """Read a row of the site's own, so that a mistake in its settings is told here and not in a run.

    Raises:
        UserError: the rows cannot be read, or lack the columns of the text.
    """
    from fedstrata.data.read import read

    data = settings.data
    columns = [data.text] if isinstance(data.text, str) else data.text
    for source in (data.train, data.test):
        for each in source.values() if isinstance(source, dict) else [source] if source else []:
            if isinstance(each, str) and each.startswith("demo:"):
                continue
            try:
                read(each, columns, names=data.columns, limit=1, base_dir=settings.home, documents=data.documents)
            except UserError as error:
                try:  # files with a word per line, of a task that labels words
                    read(each, columns, names=data.columns, limit=1, base_dir=settings.home, words=True)
                except UserError:
                    raise error from None


def secret(folder: Path) -> Path:
    """The file with a secret that only the user knows who runs this, made where there is none."""
    path = folder / "secret"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


def _reach(settings: SiteSettings, ca: bytes | None) -> Reach:
    """The way to the layers of the site's server, and of no other."""
    from fedstrata.sites.stream import ActivationClient

    def reach(request: Request, port: int, token: str, deadline: float) -> ActivationClient:
        return ActivationClient(address(settings.host, port), request, token, ca, deadline)

    return reach


def _supervise(
    command: Sequence[str],
    log: Path,
    home: Path,
    stop: threading.Event,
    say: Say,
    come_up: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> None:
    """Keep a program of Flower's running until told to stop; what it prints goes to ``log``."""
    from fedstrata.sites import flower

    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "FLWR_HOME": str(home / "flower")}
    while not stop.is_set():
        with suppress(FileNotFoundError):
            log.replace(log.with_suffix(".old.log"))
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        try:
            come_up(process)
            while process.poll() is None and not stop.wait(0.2):
                pass
        finally:
            _end(process)
        if not stop.is_set():
            say(f"{flower.complaint(_tail(log))}; trying again in {AGAIN:.0f} s")
            stop.wait(AGAIN)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    """The end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        return file.read().decode(errors="replace")


def _alone(insecure: bool, host: str) -> None:
    if insecure and not loopback(host):
        raise UserError(f"--insecure: is for one machine alone (host = '127.0.0.1'), and the server is {host}")


def _free(bind: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((bind, port))
        except OSError as error:
            raise UserError(f"serve: cannot listen on {address(bind, port)}: {error.strerror}") from None


def _any_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=10_000_000, backupCount=3, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is inside as they should: without a word."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
