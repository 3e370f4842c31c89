"""A federation's first files: settings, keys and, for local tests, certificates."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedstrata.errors import FULL, UserError
from fedstrata.sites.certificates import (
    Certificates,
    client_certificate,
    make_certificates,
    make_client_ca,
    read_certificates,
)
from fedstrata.sites.checks import join_address, site_name
from fedstrata.sites.settings import Listen, ServerSettings, read_server, validated
from fedstrata.sites.templates import CLIENT, CLIENTS, LOCAL_CERTIFICATE, SERVER, SITE

ENTRIES = ("tls", "keys", "sites", "server.toml")
"""What a federation's folder holds, in the order in which it is put there."""


def init(
    folder: Path,
    sites: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 9440,
    stream_port: int = 9441,
    message_port: int = 9442,
    tls: tuple[Path, Path, Path] | None = None,
    client_certificates: bool = False,
) -> list[Path]:
    """Write a federation: ``server.toml`` with certificate and public keys, and a folder to hand to each site.

    A private key is readable by its owner alone. If anything fails, nothing has been written.

    Args:
        folder: to write into; it may hold other things.
        sites: their names.
        host: name or address under which sites reach the server.
        port: for Flower.
        stream_port: for activations.
        message_port: for messages.
        tls: the server's own certificate as PEM files: of the CA that signed it, itself, its private key. None
            makes a certificate for a year and the CA that signs it: enough for local tests.
        client_certificates: also make a certificate for each site, which the server then demands, and their CA.

    Returns:
        Every file written.

    Raises:
        UserError: a name, host, port or certificate is invalid, or the folder holds a federation.
    """
    need_extra()
    ports = {"port": port, "stream_port": stream_port, "message_port": message_port}
    listen = validated(Listen, {"host": host, **ports}, "federation")
    _check_names(sites)
    _check_unused(folder)
    certificates = make_certificates(host) if tls is None else read_certificates(*tls, host)
    with _building(folder) as build:
        for name in ("tls", "keys", "sites"):
            (build / name).mkdir(mode=0o700 if name == "tls" else 0o777)
        _write_certificates(build / "tls", certificates)
        client_ca = make_client_ca() if client_certificates else None
        if client_ca:
            _write(build / "tls" / "clients.pem", client_ca[0])
            _write(build / "tls" / "clients.key", client_ca[1], 0o600)
        for name in sites:
            place = build / "sites" / name
            _write_site(place, build / "keys", name, join_address(host, port), certificates.ca, client_ca)
        for name in sites:
            _write_peers(build / "sites" / name, [build / "keys" / f"{peer}.pub" for peer in sites])
        _write(build / "server.toml", _server_toml(listen, certificates, sites, bool(client_ca)).encode())
        written = [path.relative_to(build) for path in build.rglob("*") if path.is_file()]
        _move([(build / name, folder / name) for name in ENTRIES])
    return sorted(folder / path for path in written)


def add_site(folder: Path, name: str) -> list[Path]:
    """Add a site to a federation: its keys, its folder, and its line in ``server.toml``.

    The other sites need its public key among their ``peers`` before they add to masked sums with it.

    Returns:
        Every file written or changed.

    Raises:
        UserError: the name is invalid or taken, or the folder holds no valid federation.
    """
    need_extra()
    if os.path.isfile(folder) and folder.name != "server.toml":
        raise UserError(f"{folder}: is a file; expected the folder of a federation, or its server.toml")
    settings = read_server(folder)
    folder = settings.home
    _check_names([name], settings.sites)
    places = folder / "keys" / f"{name}.pub", folder / "sites" / name, (folder / "server.toml").resolve()
    for place in places[:2]:
        if os.path.lexists(place):
            raise UserError(f"{place}: already exists; move it away or give the site another name")
    content = _with_site(folder / "server.toml", name)
    with _building(folder) as build:
        public, private, changed = build / "public" / places[0].name, build / "private", build / "server.toml"
        public.parent.mkdir()
        address = join_address(settings.host, settings.port)
        client_ca = _client_ca(settings) if settings.tls.clients else None
        _write_site(private, public.parent, name, address, settings.tls.ca.read_bytes(), client_ca)
        _write_peers(private, [*settings.sites.values(), public])
        _write(changed, content)
        shutil.copymode(places[2], changed)
        written = [places[1] / path.relative_to(private) for path in private.rglob("*") if path.is_file()]
        for place in places[:2]:
            place.parent.mkdir(exist_ok=True)
        _move(list(zip((public, private, changed), places, strict=True)))
    return sorted([places[0], folder / "server.toml", *written])


def need_extra() -> None:
    """Check that the libraries for keys and certificates are installed.

    Raises:
        UserError: one is not.
    """
    try:
        import cryptography  # noqa: F401
        import tomlkit  # noqa: F401
        import trustme  # noqa: F401
    except ImportError:
        raise UserError("federation: needs the extra 'flower': pip install 'fedstrata[flower]'") from None


def _check_unused(folder: Path) -> None:
    if found := [name for name in ENTRIES if os.path.lexists(folder / name)]:
        what = "a federation already" if "server.toml" in found else f"{', '.join(found)}, which would be mixed up"
        raise UserError(f"{folder}: holds {what}; name a new or empty folder")


def _check_names(names: Sequence[str], taken: Iterable[str] = ()) -> None:
    if not names:
        raise UserError("federation: no site is named; expected one or more")
    known = {name.casefold() for name in taken}
    for name in names:
        try:
            site_name(name)
        except ValueError as error:
            raise UserError(f"federation: {error}") from None
        if name.casefold() in known:
            raise UserError(f"federation: {name!r} is the name of another site; expected names that differ")
        known.add(name.casefold())


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A temporary folder on the disk of ``folder``; a new ``folder`` stays only if something is moved into it."""
    new = not os.path.lexists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".making-") as build:
            yield Path(build)
    except OSError as error:
        cause = error if error.errno in FULL else None
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror})") from cause
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()


def _move(moves: Sequence[tuple[Path, Path]]) -> None:
    """Move built files to their places. The last move commits: if it fails, the others are undone."""
    try:
        for built, place in moves:
            os.replace(built, place)
    except BaseException:
        if moves[-1][0].exists():
            for built, place in moves[:-1]:
                if not built.exists():
                    os.replace(place, built)
        raise


def _write(path: Path, content: bytes, mode: int = 0o666) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_certificates(folder: Path, certificates: Certificates) -> None:
    _write(folder / "ca.pem", certificates.ca)
    _write(folder / "server.pem", certificates.certificate)
    _write(folder / "server.key", certificates.key, 0o600)
    if certificates.ca_key is not None:
        _write(folder / "ca.key", certificates.ca_key, 0o600)


def _client_ca(settings: ServerSettings) -> tuple[bytes, bytes]:
    """The CA of the sites' certificates, to sign another one.

    Raises:
        UserError: its key is not there.
    """
    assert settings.tls.clients is not None
    key = settings.tls.clients.with_suffix(".key")
    try:
        return settings.tls.clients.read_bytes(), key.read_bytes()
    except OSError:
        raise UserError(f"{key}: is not there; it signs the new site's certificate") from None


def _write_site(
    folder: Path, keys: Path, name: str, server: str, ca: bytes, client_ca: tuple[bytes, bytes] | None
) -> None:
    """Write a site's folder, and its public key among the server's ``keys``."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    folder.mkdir(mode=0o700)
    client = ""
    if client_ca:
        certificate, own_key = client_certificate(client_ca, name)
        _write(folder / f"{name}.pem", certificate)
        _write(folder / f"{name}.tls.key", own_key, 0o600)
        client = CLIENT.format(name=name)
    _write(folder / f"{name}.key", private, 0o600)
    _write(folder / "ca.pem", ca)
    _write(folder / "site.toml", SITE.format(name=name, server=server, client=client).encode())
    _write(keys / f"{name}.pub", public + f" {name}\n".encode())


def _write_peers(folder: Path, keys: Iterable[Path]) -> None:
    """Write the public keys of a federation's sites into the folder of one of them."""
    (folder / "peers").mkdir()
    for key in keys:
        _write(folder / "peers" / key.name, key.read_bytes())


def _server_toml(listen: Listen, certificates: Certificates, sites: Sequence[str], clients: bool) -> str:
    import tomlkit

    lines = tomlkit.dumps({name: f"keys/{name}.pub" for name in sites}).rstrip()
    note = LOCAL_CERTIFICATE.format(end=certificates.end) if certificates.end else ""
    return SERVER.format(**listen.model_dump(), certificate=note, sites=lines, clients=CLIENTS if clients else "")


def _with_site(path: Path, name: str) -> bytes:
    """A ``server.toml`` with one more site after the last one, and otherwise as it is.

    Raises:
        UserError: the edited text would not say what it should.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import Table

    text = path.read_bytes().decode()
    expected = tomllib.loads(text)
    expected["sites"][name] = f"keys/{name}.pub"
    with suppress(TOMLKitError, tomllib.TOMLDecodeError):
        document = tomlkit.parse(text)
        sites, line = document["sites"], tomlkit.item(f"keys/{name}.pub")
        if isinstance(sites, Table):  # tomlkit itself appends after the comments that follow, and with "\n"
            key, last = [(key, item) for key, item in sites.value.body if key is not None][-1]
            newline = "\r\n" if "\r\n" in text else "\n"
            line.trivia.trail, last.trivia.trail = last.trivia.trail, last.trivia.trail or newline
            sites.value._insert_after(key, name, line)
        else:
            document["sites"][name] = line
        changed = tomlkit.dumps(document)
        if tomllib.loads(changed) == expected:
            return changed.encode()
    raise UserError(
        f"{path}: cannot be edited; write its sites as one table [sites], a line for each, and try again"
    )
