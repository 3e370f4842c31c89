"""TLS certificates of a federation's server: new ones for local tests, and checks of the user's own."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.sites.settings import ServerSettings, SiteSettings

YEAR = timedelta(days=365)
MOST_NAME = 64
"""Characters of a name in a certificate."""
CLOCK_SKEW = timedelta(days=1)
"""How far a site's clock may be behind the server's."""
SOON, DAY = timedelta(days=30), 86400.0
"""Before its end a certificate is named, once in so many seconds."""
SERVER_THEN = (
    "then no site can connect any more; replace it (fedstrata federation renew, if federation init made it) and "
    "restart fedstrata serve"
)
SITE_THEN = (
    "then the server lets this site in no more; send it to whoever set up the federation, who renews it "
    "(fedstrata federation renew)"
)


@dataclass(frozen=True)
class Certificates:
    """Content of PEM files.

    Attributes:
        ca: certificate of the CA.
        certificate: the server's.
        key: the server's private key.
        ca_key: the CA's private key; None where it is somebody else's.
        end: when a new certificate ends; None for the user's own.
    """

    ca: bytes
    certificate: bytes
    key: bytes
    ca_key: bytes | None = None
    end: datetime | None = None


def make_certificates(host: str) -> Certificates:
    """A new CA, and a certificate that it has signed: for a year, for ``host`` and for this machine.

    Raises:
        UserError: the name of the host cannot be written in a certificate.
    """
    import trustme

    now = datetime.now(UTC)
    ca = trustme.CA(path_length=0, organization_name="FedStrata", organization_unit_name="CA for local tests")
    try:
        server = ca.issue_cert(
            *dict.fromkeys((host, "localhost", "127.0.0.1", "::1")),
            organization_name="FedStrata",
            organization_unit_name="server",
            not_before=now - CLOCK_SKEW,
            not_after=now + YEAR,
        )
    except UnicodeError as error:  # of which the errors of internationalized names are
        raise UserError(f"federation: host: {host!r} cannot be named in a certificate ({error})") from None
    return Certificates(
        ca=ca.cert_pem.bytes(),
        certificate=server.cert_chain_pems[0].bytes(),
        key=server.private_key_pem.bytes(),
        ca_key=ca.private_key_pem.bytes(),
        end=now + YEAR,
    )


def make_client_ca() -> tuple[bytes, bytes]:
    """A new CA for the certificates of sites: its certificate and its private key (PEM)."""
    import trustme

    ca = trustme.CA(path_length=0, organization_name="FedStrata", organization_unit_name="CA for sites")
    return ca.cert_pem.bytes(), ca.private_key_pem.bytes()


def client_certificate(ca: tuple[bytes, bytes], name: str) -> tuple[bytes, bytes]:
    """A site's certificate for a year, signed by a CA, and its private key (PEM); the common name is the site's.

    Raises:
        UserError: the name is too long for a certificate.
    """
    import trustme

    if len(name) > MOST_NAME:
        raise UserError(f"federation: {name!r} is too long for a certificate; expected {MOST_NAME} characters")
    now = datetime.now(UTC)
    own = trustme.CA.from_pem(*ca).issue_cert(
        common_name=name, organization_name="FedStrata", not_before=now - CLOCK_SKEW, not_after=now + YEAR
    )
    return own.cert_chain_pems[0].bytes(), own.private_key_pem.bytes()


def read_certificates(ca: Path, certificate: Path, key: Path, host: str) -> Certificates:
    """The user's own certificate files, tried in a handshake with a client that trusts ``ca`` and wants ``host``.

    Raises:
        UserError: a file cannot be read or is of another kind, or the handshake fails.
    """
    contents = [_read(which, path) for which, path in (("ca", ca), ("certificate", certificate), ("key", key))]
    for which, path in (("ca", ca), ("certificate", certificate)):
        _check_form(f"tls: {which}", path)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.hostname_checks_common_name = False
    client.load_verify_locations(ca)
    _load_pair("tls: key", server, certificate, key)
    try:
        _handshake(client, server, host)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", error.reason).rstrip(".")
        raise UserError(
            f"tls: certificate: {certificate} does not prove to a site that trusts {ca} that it reaches {host!r} "
            f"({reason})"
        ) from None
    return Certificates(contents[0], contents[1], contents[2])


def check_server(settings: ServerSettings) -> None:
    """Try a server's certificates as a site would.

    Raises:
        UserError: see :func:`read_certificates`; or the file of the CA of the sites' certificates holds none.
    """
    tls = settings.tls
    read_certificates(tls.ca, tls.certificate, tls.key, settings.host)
    if tls.clients:
        _check_form("tls: clients", tls.clients)


def check_site(settings: SiteSettings) -> None:
    """Try what a site knows its server by, and proves by who it is.

    Raises:
        UserError: a file is of another kind, or the site's certificate has ended.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from cryptography.x509 import load_pem_x509_certificate

    _check_form("ca", settings.ca)
    try:
        key: object = load_ssh_private_key(settings.key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"key: {settings.key} holds no whole ECDSA key of ssh's without passphrase")
    if settings.certificate and settings.certificate_key:
        _check_form("certificate", settings.certificate)
        own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_pair("certificate_key", own, settings.certificate, settings.certificate_key)
        end = load_pem_x509_certificate(settings.certificate.read_bytes()).not_valid_after_utc
        if end < datetime.now(UTC):
            raise UserError(
                f"certificate: {settings.certificate} has expired (on {end:%Y-%m-%d}); expected a valid one; "
                "whoever set up the federation renews it (fedstrata federation renew)"
            )


def ends_soon(path: Path, content: bytes, then: str) -> str:
    """A sentence on a certificate that ends soon or has ended; empty for another, and one that only OpenSSL reads.

    Args:
        path: its PEM file.
        content: what is in it, checked by :func:`check_server` or :func:`check_site`.
        then: what follows, and what to do.
    """
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificate

    try:
        end = load_pem_x509_certificate(content).not_valid_after_utc
    except (ValueError, InvalidVersion):
        return ""
    return f"{path}: expires on {end:%Y-%m-%d}; {then}" if end - datetime.now(UTC) < SOON else ""


class Ending:
    """Says once a day that a certificate ends soon; called again and again.

    Args:
        certificate: its PEM file, as it is when the program starts and takes it; None for none.
        then: see :func:`ends_soon`.
        say: prints a line.
    """

    def __init__(self, certificate: Path | None, then: str, say: Callable[[str], None]) -> None:
        self.content = certificate and (certificate, certificate.read_bytes())
        self.then, self.say = then, say
        self.looked = -DAY

    def __call__(self) -> None:
        """Look at it, unless that was done today."""
        if self.content and time.monotonic() >= self.looked + DAY:
            self.looked = time.monotonic()
            if words := ends_soon(*self.content, self.then):
                self.say(words)


def _check_form(where: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise UserError(f"{where}: {path} holds no certificate in PEM form") from None


def _load_pair(where: str, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise UserError(f"{where}: {key} is not the key of {certificate}") from None
        raise UserError(f"{where}: {key} holds no private key in PEM form without passphrase") from None


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    """A TLS handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=host)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client_side, server_side, client_side):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()


def _read(which: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"tls: {which}: {path} cannot be read ({error.strerror})") from None
