"""Another year for a certificate that a federation's own CA has signed."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.errors import UserError
from fedstrata.sites.certificates import CLOCK_SKEW, YEAR
from fedstrata.sites.provision import need_extra
from fedstrata.sites.settings import ServerSettings, read_server
from fedstrata.wire.files import write_bytes

if TYPE_CHECKING:  # an extra
    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
    from cryptography.x509 import Certificate


def renew(folder: Path, certificate: Path | None = None) -> tuple[Path, datetime]:
    """Replace a certificate by one for the same key and names, for a year from now but no longer than its CA.

    Its key stays where it is: a site sends its certificate alone, and gets it back renewed.

    Args:
        folder: of the federation, or its ``server.toml``.
        certificate: a site's, as a PEM file; None for the server's.

    Returns:
        The file, and when the new certificate ends.

    Raises:
        UserError: the federation's CA has not signed it or has expired, the CA's key is missing, the site is no
            longer in ``server.toml``, the file holds more than the certificate, or cannot be read or written.
    """
    need_extra()
    settings = read_server(folder)
    tls = settings.tls
    ca_path, path = (tls.ca, tls.certificate) if certificate is None else (tls.clients, certificate)
    if ca_path is None:
        raise UserError(f"{folder}: its sites have no certificates; [tls] clients is not set in server.toml")
    ca, old = _certificate(ca_path), _certificate(path, alone=True)
    if not _issued(old, ca):
        raise UserError(f"{path}: was not signed by {ca_path}; whoever has signed it can renew it")
    if certificate is not None:
        _check_site(path, old, settings)
    end = min(datetime.now(UTC) + YEAR, ca.not_valid_after_utc)
    if end < datetime.now(UTC):
        raise UserError(f"{ca_path}: has expired (on {end:%Y-%m-%d}), so that nothing it signs is valid")
    new = _signed(old, ca, _ca_key(ca_path, ca), end)
    try:
        write_bytes(Path(os.path.realpath(path)), new)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return path, end


def _issued(certificate: Certificate, ca: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _certificate(path: Path, alone: bool = False) -> Certificate:
    """The first certificate of a PEM file; ``alone``: in which nothing else may stand, as it will be replaced."""
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificate

    try:
        content = path.read_bytes()
        certificate = load_pem_x509_certificate(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, InvalidVersion):
        raise UserError(f"{path}: holds no certificate in PEM form") from None
    if alone and content.count(b"-----BEGIN ") > 1:
        raise UserError(f"{path}: holds more than a certificate, such as its key; expected a file of it alone")
    return certificate


def _check_site(path: Path, certificate: Certificate, settings: ServerSettings) -> None:
    from cryptography.x509.oid import NameOID

    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(names) != 1 or names[0] not in settings.sites:
        raise UserError(f"{path}: is for {', '.join(names) or 'no site'}; expected a site that server.toml lists")


def _ca_key(ca_path: Path, ca: Certificate) -> CertificateIssuerPrivateKeyTypes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path = ca_path.with_suffix(".key")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); it signs the new certificate") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError(f"{path}: holds no private key in PEM form without passphrase") from None
    if key.public_key() != ca.public_key():
        raise UserError(f"{path}: is not the key of {ca_path}")
    return key


def _signed(old: Certificate, ca: Certificate, key: CertificateIssuerPrivateKeyTypes, end: datetime) -> bytes:
    """A certificate that says what the old one says, with other dates and another number (PEM)."""
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509 import CertificateBuilder, random_serial_number

    builder = CertificateBuilder(
        issuer_name=ca.subject,
        subject_name=old.subject,
        public_key=old.public_key(),
        serial_number=random_serial_number(),
        not_valid_before=datetime.now(UTC) - CLOCK_SKEW,
        not_valid_after=end,
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    new: bytes = builder.sign(key, old.signature_hash_algorithm).public_bytes(Encoding.PEM)
    return new
