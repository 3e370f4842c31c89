"""Sites at Flower's SuperLink: those whose keys are admitted are registered there, others are removed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.sites.admission import Admission, keys_now
from fedstrata.sites.checks import join_address
from fedstrata.sites.control_client import control_client
from fedstrata.sites.flower import public_key
from fedstrata.sites.flower_processes import failure_reason, tail

import httpx  # isort: skip  (flower says first what is needed for it)
from flwr.proto import control_pb2  # isort: skip

STARTUP_SECONDS = 60.0
"""For the SuperLink to come up."""
UNREGISTERED = "unregistered"
"""Status of a site that was removed; its key cannot be registered again before the SuperLink is restarted."""


def register(address: str, ca: bytes | None, keys: Mapping[str, Path], secret: bytes) -> None:
    """Make the sites at a SuperLink these: name -> public key; without keys all stay.

    Args:
        address: ``host:port`` of the SuperLink.
        ca: certificate (PEM) of the CA that signed its own; None for plain text.
        keys: name -> file of the public key.
        secret: the SuperLink's, which only its own user knows.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    wanted = {public_key(path): name for name, path in keys.items()}
    with control_client(address, ca, secret) as control:
        nodes = control.ListNodes(control_pb2.ListNodesRequest()).nodes_info
        known = {node.public_key for node in nodes}
        for key, name in wanted.items():
            if key not in known:
                control.RegisterNode(control_pb2.RegisterNodeRequest(public_key=key, name=name))
        for node in nodes if keys else ():
            if node.public_key not in wanted and node.status != UNREGISTERED:
                with suppress(
                    httpx.HTTPStatusError
                ):  # of a site that was never there, and is removed all the same
                    control.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=node.node_id))


def register_when_up(
    admission: Admission, insecure: bool, process: subprocess.Popen[bytes], log: Path, secret: bytes
) -> None:
    """Register the admitted sites at Flower's server as soon as it answers.

    Raises:
        UserError: it ends, or does not answer in time.
    """
    settings = admission.settings
    server = join_address(settings.host, settings.port)
    ca = None if insecure else settings.tls.ca.read_bytes()
    until = time.monotonic() + STARTUP_SECONDS
    while True:
        try:
            register(server, ca, {} if insecure else keys_now(admission.settings), secret)
        except httpx.HTTPError as error:
            if process.poll() is not None or time.monotonic() > until:
                why = failure_reason(tail(log))
                raise UserError(f"serve: Flower's server does not come up: {why} ({error})") from None
            time.sleep(0.2)
        else:
            return
