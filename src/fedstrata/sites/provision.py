"""A federation's first files: settings, keys and, for a try-out, certificates."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

from fedstrata.errors import UserError
from fedstrata.sites.settings import Listen, address, checked, read_server, site_name

SERVER = """\
# The server of a federation. A relative path starts at the folder of this file.

host = "{host}"  # name or address under which sites reach this machine; it stands in the certificate
# bind = "{bind}"  # address to listen on; default: host if it is this machine alone, else every address
port = {port}  # for Flower, which carries messages; default 9440
stream_port = {stream_port}  # for hidden states, of methods that split the model; default 9441

{tried}[tls]
ca = "tls/ca.pem"  # certificate of who signed the next one; every site has a copy
certificate = "tls/server.pem"  # what the server shows to the sites
key = "tls/server.key"  # its private key, readable by its owner alone (chmod 600)

# Who may take part: the name of each site and its public key. No default: others are refused.
[sites]
{sites}
"""

TRIED = """\
# The certificate was made for a try-out and ends on {end:%Y-%m-%d}. With tls/ca.key, which belongs on another
# machine, the next one can be signed.
"""

SITE = """\
# A site of a federation. A relative path starts at the folder of this file.
# This folder is for the site alone: hand it over in private, then delete it at the server.

name = "{name}"  # under which the server knows this site
server = "{server}"  # the server's address for Flower
ca = "ca.pem"  # certificate by which the server is known
key = "{name}.key"  # this site's private key, readable by its owner alone (chmod 600)
folder = "state"  # on this site's disk: parts it keeps, received parts, logs; made when needed

# The site's own rows.
[data]
train = "train.csv"  # EDIT: a file (csv tsv jsonl json parquet txt), a folder, a list, or a data set id
text = "text"  # column of the text; two columns in a list for pairs; default "text"
label = "label"  # column of the label; default "label"
# test = "test.csv"  # test rows; default: the share that the job asks for, kept aside of train
# columns = ["text", "label"]  # names of the columns, of files without a header line; default: the header line
# limit = 1000  # read at most so many rows; default: all
# documents = "lines"  # a row of a plain txt file: "lines" (default), "blank" or "headings" between rows

[device]
name = "auto"  # "cpu", "cuda", or "auto": a GPU if there is one (default)
# threads = 4  # threads of the processor; default: as many as it has cores

# What may leave this site: "weights" are parts of the model; "hidden_states" are those of its texts, with their
# labels; "activations" are hidden states of every batch, and gradients.
[allow]
payloads = ["weights"]  # of these three; default ["weights"]
# methods = ["fedavg", "fedbfpt"]  # by which the site takes part; default: every method

[limits]
# bytes_per_round = 500_000_000  # most bytes that may leave in a round; default: no limit
min_examples = 1  # fewest examples of its own that it trains on; default 1
"""

YEAR = timedelta(days=365)
LATE = timedelta(days=1)
"""How far a site's clock may be behind the server's."""


def init(
    folder: Path,
    sites: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 9440,
    stream_port: int = 9441,
    tls: tuple[Path, Path, Path] | None = None,
) -> list[Path]:
    """Write a federation: ``server.toml`` with certificate and public keys, and a folder to hand to each site.

    A private key is readable by its owner alone. If anything fails, nothing has been written.

    Args:
        folder: to write into; it may hold other things.
        sites: their names.
        host: name or address under which sites reach the server.
        port: for Flower.
        stream_port: for hidden states.
        tls: the server's own certificate, as PEM files: of who signed it, itself, its private key. None makes a
            certificate for a year, and who signs it: enough for a try-out.

    Returns:
        Every file written.

    Raises:
        UserError: a name, host, port or certificate is not legal, or the folder holds a federation.
    """
    _need_cryptography()
    listen = checked(Listen, {"host": host, "port": port, "stream_port": stream_port}, "federation")
    _check_names(sites)
    held = [name for name in ("server.toml", "tls", "keys", "sites") if os.path.lexists(folder / name)]
    if held:
        found = "a federation already" if "server.toml" in held else f"{', '.join(held)}, which would be mixed up"
        raise UserError(f"{folder}: holds {found}; name a new or empty folder")
    given = None if tls is None else _own(*tls, host)
    with _building(folder) as made:
        for name in ("tls", "keys", "sites"):
            (made / name).mkdir(mode=0o700 if name == "tls" else 0o777)
        if given is None:
            ca = _try_out(made / "tls", host)
        else:
            ca, certificate, key = given
            _write(made / "tls" / "ca.pem", ca)
            _write(made / "tls" / "server.pem", certificate)
            _write(made / "tls" / "server.key", key, 0o600)
        for name in sites:
            _site(made / "sites" / name, made / "keys", name, address(host, port), ca)
        tried = "" if given else TRIED.format(end=datetime.now(UTC) + YEAR)
        content = SERVER.format(**listen.model_dump(), tried=tried, sites="\n".join(map(_line, sites)))
        _write(made / "server.toml", content.encode())
        written = [path.relative_to(made) for path in made.rglob("*") if path.is_file()]
        _place([(made / name, folder / name) for name in ("tls", "keys", "sites", "server.toml")])
    return sorted(folder / path for path in written)


def add_site(folder: Path, name: str) -> list[Path]:
    """Add a site to a federation: its keys, its folder, and its line in ``server.toml``.

    Returns:
        Every file written or changed.

    Raises:
        UserError: the name is not legal or taken, or the folder holds no valid federation.
    """
    _need_cryptography()
    settings = read_server(folder)
    folder = settings.home
    _check_names([name], settings.sites)
    places = folder / "keys" / f"{name}.pub", folder / "sites" / name, (folder / "server.toml").resolve()
    for place in places[:2]:
        if os.path.lexists(place):
            raise UserError(f"{place}: is there already; move it away or name the site otherwise")
    content = _with_site(folder / "server.toml", name)
    with _building(folder) as made:
        public, private, changed = made / "public" / places[0].name, made / "private", made / "server.toml"
        public.parent.mkdir()
        _site(private, public.parent, name, address(settings.host, settings.port), settings.tls.ca.read_bytes())
        _write(changed, content)
        shutil.copymode(places[2], changed)
        written = [places[1] / path.name for path in private.iterdir()]
        for place in places[:2]:
            place.parent.mkdir(exist_ok=True)
        _place(list(zip((public, private, changed), places, strict=True)))
    return sorted([places[0], folder / "server.toml", *written])


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UserError("federation: needs the extra 'flower': pip install 'fedstrata[flower]'") from None


def _check_names(names: Sequence[str], taken: Iterable[str] = ()) -> None:
    if not names:
        raise UserError("federation: no site is named; legal: one or more")
    known = {name.casefold() for name in taken}
    for name in names:
        try:
            site_name(name)
        except ValueError as error:
            raise UserError(f"federation: {error}") from None
        if name.casefold() in known:
            raise UserError(f"federation: {name!r} is the name of another site; legal: names that differ")
        known.add(name.casefold())


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A folder to build in, on the disk of ``folder``, which stays only if something is placed in it."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".making-") as made:
            yield Path(made)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror})") from None
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()


def _place(moves: Sequence[tuple[Path, Path]]) -> None:
    """Move what is made to its places. The last move counts: unless it is done, the others are undone."""
    try:
        for made, place in moves:
            os.replace(made, place)
    except BaseException:
        if moves[-1][0].exists():
            for made, place in moves[:-1]:
                if not made.exists():
                    os.replace(place, made)
        raise


def _write(path: Path, content: bytes, mode: int = 0o666) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _line(name: str) -> str:
    """A site's line under ``[sites]``."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    return f'{key} = "keys/{name}.pub"'


def _with_site(path: Path, name: str) -> bytes:
    """A ``server.toml`` with one more line at the end of ``[sites]``, and else as it is."""
    text = path.read_bytes().decode()
    newline = "\r\n" if "\r\n" in text else "\n"
    lines, end = text.split(newline), None
    for i, line in enumerate(lines):
        if re.match(r"\s*\[\s*sites\s*\]", line):
            end = i
        elif end is not None and re.match(r"\s*\[", line):
            break
        elif end is not None and re.match(r"\s*[^\s#]", line):
            end = i
    wanted = tomllib.loads(text)
    wanted["sites"][name] = f"keys/{name}.pub"
    if end is not None:
        lines.insert(end + 1, _line(name))
        text = newline.join(lines)
        with suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(text) == wanted:
                return text.encode()
    raise UserError(f"{path}: has no plain table [sites], with a line for each site; write it so and try again")


def _site(folder: Path, keys: Path, name: str, server: str, ca: bytes) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    folder.mkdir(mode=0o700)
    _write(folder / f"{name}.key", private, 0o600)
    _write(folder / "ca.pem", ca)
    _write(folder / "site.toml", SITE.format(name=name, server=server).encode())
    _write(keys / f"{name}.pub", public + f" {name}\n".encode())


def _try_out(folder: Path, host: str) -> bytes:
    """Write a server's certificate and who signs it, with both private keys.

    Returns:
        The signer's certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    def usage(ca: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not ca,
            key_cert_sign=ca,
            crl_sign=ca,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    def certificate(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, ca: bool) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - LATE)
            .not_valid_after(now + YEAR)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
            .add_extension(usage(ca), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )

    def write(name: str, key: ec.EllipticCurvePrivateKey) -> None:
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(folder / name, private, 0o600)

    signer, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    names: list[x509.GeneralName] = []
    for name in dict.fromkeys((host, "localhost", "127.0.0.1", "::1")):
        try:
            names.append(x509.IPAddress(ip_address(name)))
        except ValueError:
            names.append(x509.DNSName(name))
    ca = certificate("FedStrata try-out CA", "FedStrata try-out CA", signer, True).sign(signer, hashes.SHA384())
    server = (
        certificate("FedStrata server", "FedStrata try-out CA", own, False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA384())
    )
    pem: bytes = ca.public_bytes(serialization.Encoding.PEM)
    _write(folder / "ca.pem", pem)
    _write(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM))
    write("ca.key", signer)
    write("server.key", own)
    return pem


def _own(ca: Path, certificate: Path, key: Path, host: str) -> tuple[bytes, bytes, bytes]:
    """The content of a server's own certificate files, tried on a client that knows ``ca`` and wants ``host``."""
    contents = [_pem(which, path) for which, path in (("ca", ca), ("certificate", certificate), ("key", key))]
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.hostname_checks_common_name = False
    for which, path in (("ca", ca), ("certificate", certificate)):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except ssl.SSLError:
            raise UserError(f"tls: {which}: {path} holds no certificate in PEM form") from None
    client.load_verify_locations(ca)
    try:
        server.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise UserError(f"tls: key: {key} is not the key of {certificate}") from None
        raise UserError(f"tls: key: {key} holds no private key in PEM form without passphrase") from None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(back, there, server_hostname=host)
    answers = server.wrap_bio(there, back, server_side=True)
    try:
        for side in (asks, answers, asks):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", error.reason).rstrip(".")
        raise UserError(
            f"tls: certificate: {certificate} does not prove to a site that knows {ca} that it reaches {host!r} "
            f"({reason})"
        ) from None
    return contents[0], contents[1], contents[2]


def _pem(which: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"tls: {which}: {path} cannot be read ({error.strerror})") from None
