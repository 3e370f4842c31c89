"""The state of a federation: which sites are connected, what its run is at, who is waited for, until when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from fedstrata.errors import UserError
from fedstrata.sites.admission import keys_now
from fedstrata.sites.certificates import check_server
from fedstrata.sites.checks import join_address
from fedstrata.sites.control_secret import read_secret
from fedstrata.sites.flower_processes import prepare_flower
from fedstrata.sites.run_record import RUN_LOCK, read_record
from fedstrata.sites.settings import ServerSettings
from fedstrata.wire.files import locked

FRESH_SECONDS = 2.0
"""For which a state that was found is shown again."""


@dataclass(frozen=True)
class Found:
    """What Flower's server says.

    Attributes:
        running: it answers.
        why: why it does not.
        sites: public key -> since when the site is connected, None for one that is not.
        nameless: connected sites that have no keys.
    """

    running: bool
    why: str = ""
    sites: dict[bytes, float | None] | None = None
    nameless: int = 0


def federation_status(settings: ServerSettings, insecure: bool) -> dict[str, Any]:
    """The state of a federation as a table that can be written as JSON.

    Times are in seconds since 1970, rounds count from 0.

    Args:
        settings: the server's.
        insecure: its server runs without TLS and keys, so that of connected sites only the number is known.

    Returns:
        ``server``: ``address``, ``running``, ``message``. ``sites``: name -> ``admitted``, ``since`` and
        ``connected`` (None: not known). ``nameless``: how many are connected without keys. ``run``: the fields of
        :class:`fedstrata.sites.run_record.RunRecord`, with the status "killed" as well; None before the first.

    Raises:
        UserError: the federation's secret is another user's.
    """
    from fedstrata.sites.flower import public_key

    found = _ask(settings, insecure)
    admitted = keys_now(settings)
    sites: dict[str, dict[str, Any]] = {}
    for name, path in settings.sites.items():
        since = found.sites.get(public_key(path)) if found.sites is not None else None
        connected = None if found.sites is None else since is not None
        sites[name] = {"admitted": name in admitted, "connected": connected, "since": since}
    address = join_address(settings.host, settings.port)
    server = {"address": address, "running": found.running, "message": found.why}
    return {"server": server, "sites": sites, "nameless": found.nameless, "run": _run(settings.home)}


def _run(home: Path) -> dict[str, Any] | None:
    record = read_record(home)
    if record is None:
        return None
    if record.status == "running" and not locked(home / RUN_LOCK):
        # who waited is not there any more
        return record.model_dump() | {"status": "killed", "waiting": [], "until": None, "ends": None}
    return record.model_dump()


def _ask(settings: ServerSettings, insecure: bool) -> Found:
    """Ask Flower's server which sites are connected."""
    if not (settings.home / "secret").exists():
        return Found(False, "fedstrata serve was never started in this folder")
    secret = read_secret(settings.home)
    try:
        if not insecure:
            check_server(settings)
    except UserError as error:
        return Found(False, str(error))
    prepare_flower()
    from fedstrata.sites.control_client import control_client
    from fedstrata.sites.flower_pull import DISTRUSTED, RENEW, first_line

    import httpx  # isort: skip  (control_client says first what is needed for it)
    from flwr.proto import control_pb2  # isort: skip

    ca = None if insecure else settings.tls.ca.read_bytes()
    try:
        with control_client(join_address(settings.host, settings.port), ca, secret) as control:
            nodes = control.ListNodes(control_pb2.ListNodesRequest()).nodes_info
    except httpx.HTTPStatusError as error:
        return Found(
            False, f"another program answers there, or the server of another folder ({error.response.status_code})"
        )
    except httpx.HTTPError as error:
        why = first_line(error)[:200]
        return Found(False, f"{why}; {RENEW}" if DISTRUSTED in why else why)
    online = [node for node in nodes if node.status == "online"]
    if insecure:
        return Found(True, nameless=len(online))
    return Found(True, sites={node.public_key: _seconds(node.last_activated_at) for node in online})


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0


class Fresh:
    """A function's value, asked for at most every two seconds, by one thread at a time.

    Args:
        ask: the function.
    """

    def __init__(self, ask: Callable[[], dict[str, Any]]) -> None:
        self.ask, self.lock = ask, Lock()
        self.value: dict[str, Any] = {}
        self.asked = float("-inf")

    def __call__(self) -> dict[str, Any]:
        """The value, two seconds old at most."""
        with self.lock:
            if time.monotonic() > self.asked + FRESH_SECONDS:
                self.value, self.asked = self.ask(), time.monotonic()
            return self.value
