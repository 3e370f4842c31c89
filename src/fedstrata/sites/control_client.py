"""The client of Flower's control API: every call is signed, see :mod:`fedstrata.sites.control_secret`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedstrata.sites.control_secret import HEADER, sign
from fedstrata.sites.flower_processes import prepare_flower

prepare_flower()

import httpx
from flwr.supercore import interceptors
from flwr.supercore.control import ControlHttpClient


class SigningInterceptor:
    """Signs every call with the secret of the SuperLink's user."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Sign a call and send it."""
        request = context.request
        request.headers[HEADER] = sign(self.secret, request.url.path, request.content)
        return call_next(context)


def control_client(address: str, ca: bytes | None, secret: bytes) -> ControlHttpClient:
    """A client of the SuperLink's control API, which answers those alone who have its secret."""
    chain = [interceptors.RuntimeVersionHttpInterceptor(component_name="fedstrata"), SigningInterceptor(secret)]
    return ControlHttpClient.from_server_address(address, ca is None, ca, chain)
