"""The port of a gRPC server, and how the two ends of a connection prove who they are."""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from fedstrata.errors import UserError

ServerTLS = tuple[bytes, ...]
ClientTLS = bytes | tuple[bytes, bytes, bytes]
"""A client's: the CA of the server's certificate; or that, the client's private key and its certificate (PEM)."""
MOST_FILES = 1 << 16
NOBODYS = secrets.token_bytes(32)
"""With which a token is compared where the name is not known, so that this takes as long."""


def open_channel(address: str, tls: ClientTLS | None, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """A connection to a server; without TLS for tests on one machine."""
    if tls is None:
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(*((tls,) if isinstance(tls, bytes) else tls))
    return grpc.secure_channel(address, credentials, options)


def caller(call: Any, what: str, tokens: Mapping[str, bytes]) -> str:
    """Whose call this is, by its token and, where clients show a certificate, by the name in that.

    Tokens are compared in constant time, failures are uninformative; they end the call.

    Args:
        call: gRPC's context of the call.
        what: callers are called; ``WHAT-bin`` of the metadata is the name.
        tokens: name -> its token.
    """
    metadata = dict(call.invocation_metadata())
    name: str = metadata.get(f"{what}-bin", b"").decode(errors="replace")
    known = hmac.compare_digest(metadata.get("token-bin", b""), tokens.get(name, NOBODYS))
    shown = call.auth_context().get("x509_common_name")
    if not (known and (shown is None or list(shown) == [name.encode()])):
        call.abort(grpc.StatusCode.UNAUTHENTICATED, f"{what} or token is not known")
    return name


def more_files() -> None:
    """Let this process have as many files open as it may: strangers open more than usual limits allow."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def listen(server: grpc.Server, address: str, tls: ServerTLS | None, sentence: str) -> int:
    """Let a server listen; returns the port.

    Args:
        server: not yet started.
        address: "HOST:PORT"; port 0 takes a free one.
        tls: certificate chain and key, and the CA of the clients' certificates where they must have some (PEM);
            None without TLS.
        sentence: said where that cannot be; ``{address}`` in it is replaced.

    Raises:
        UserError: the address cannot be listened on.
    """
    try:
        if tls:
            chain, key, *clients = tls
            own = [(key, chain)]
            credentials = grpc.ssl_server_credentials(own, *clients, require_client_auth=bool(clients))
            return int(server.add_secure_port(address, credentials))
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise UserError(sentence.format(address=address)) from None
