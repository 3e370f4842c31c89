"""The port of a gRPC server."""

from __future__ import annotations

import grpc

from fedstrata.errors import UserError


def listen(server: grpc.Server, address: str, tls: tuple[bytes, bytes] | None, sentence: str) -> int:
    """Let a server listen; returns the port.

    Args:
        server: not yet started.
        address: "HOST:PORT"; port 0 takes a free one.
        tls: certificate and key; None without TLS.
        sentence: said where that cannot be; ``{address}`` in it is replaced.

    Raises:
        UserError: the address cannot be listened on.
    """
    try:
        if tls:
            chain, key = tls
            return int(server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)])))
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise UserError(sentence.format(address=address)) from None
