"""The live page of a federation: read-only, for the user of ``fedstrata serve``, on the machine's loopback alone.

Other users of the machine can connect, too, so the address holds a token that is made of the federation's secret.
A web page from elsewhere in the browser of whoever looks cannot read it: it does not know the token, only requests
for loopback by name or address are answered, and no other page may frame or fetch it.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any

from fedstrata.errors import UserError
from fedstrata.reports.live import live_page
from fedstrata.sites.settings import ServerSettings, read_server
from fedstrata.sites.status import Fresh, federation_status

HOST = "127.0.0.1"
NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""The header ``Host`` of a request that is answered; the port is another one behind a tunnel."""
SECONDS = 5.0
"""For a request to arrive, and for its answer to leave."""
MOST_HEAD = 8192
"""Bytes of a request line with its headers."""
MOST_AT_ONCE = 8
"""Connections; one more is closed at once."""
REFRESH_SECONDS = 5
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
NOTHING = "default-src 'none'; frame-ancestors 'none'"
"""The Content-Security-Policy of an answer that is no page."""
Page = Callable[[bool], tuple[str, str]]
"""Makes the page, which is loaded again by itself or not, and its Content-Security-Policy."""


class PageServer(ThreadingMixIn, TCPServer):
    """Answers requests for the page until it is closed.

    Args:
        port: to listen on; 0 takes an unused one.
        secret: of the federation.
        page: makes the page.

    Raises:
        UserError: the port is taken.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, secret: bytes, page: Page) -> None:
        self.page, self.free = page, BoundedSemaphore(MOST_AT_ONCE)
        self.token = hmac.new(secret, b"fedstrata live page", hashlib.sha256).hexdigest()[:32]
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"page_port: cannot listen on {HOST}:{port}: {error.strerror}") from None

    def __enter__(self) -> PageServer:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or not at all where too many are at it."""
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See :class:`socketserver.ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    request_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(_read_head(self.connection)))

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not NAMES.fullmatch(hosts[0].strip()):
            self._answer(HTTPStatus.FORBIDDEN, "This page is for this machine alone.")
            return
        start, _, name = self.path.removeprefix("/").partition("/")
        known = hmac.compare_digest(start.encode("utf-8", "replace"), self.server.token.encode())
        if not known or name not in ("", "still") or not self.path.startswith("/"):
            self._answer(
                HTTPStatus.NOT_FOUND, "Not found. fedstrata serve --page prints the page's whole address."
            )
            return
        again = {} if name else {"Refresh": str(REFRESH_SECONDS)}
        try:
            page, policy = self.server.page(not name)
            self._answer(HTTPStatus.OK, page, "text/html", policy, **again)
        except UserError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), **again)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of what cannot be answered nothing is repeated."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD alone.", Allow="GET, HEAD")
        else:
            self._answer(HTTPStatus.BAD_REQUEST, "Not understood.")

    def _answer(
        self, status: HTTPStatus, text: str, kind: str = "text/plain", policy: str = NOTHING, **more: str
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.close_connection = True
        if self.request_version == "HTTP/0.9":  # has no headers, so no protection
            return
        self.send_response_only(status)
        fields = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**fields, "Content-Security-Policy": policy, **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _read_head(connection: socket.socket) -> bytes:
    """The request line and the headers; nothing if they are too long, or come too slowly."""
    until, head = time.monotonic() + SECONDS, b""
    with suppress(OSError):
        while b"\r\n\r\n" not in head:
            left = until - time.monotonic()
            if left <= 0 or len(head) == MOST_HEAD:
                return b""
            connection.settimeout(left)
            if not (piece := connection.recv(MOST_HEAD - len(head))):
                return b""
            head += piece
        connection.settimeout(SECONDS)
        return head
    return b""


@contextmanager
def show_page(
    settings: ServerSettings, insecure: bool, secret: bytes, say: Callable[[str], None]
) -> Iterator[None]:
    """Show a federation's page inside the block.

    Args:
        settings: the server's; their file is read again, as sites may be added.
        insecure: the server runs without TLS and keys.
        secret: of the federation.
        say: told the page's address.

    Raises:
        UserError: the port is taken.
    """
    status = Fresh(lambda: federation_status(read_server(settings.home / "server.toml"), insecure))
    with PageServer(settings.page_port, secret, lambda refreshed: live_page(status(), refreshed)) as server:
        say(f"page {server.url}, on this machine alone")
        yield
