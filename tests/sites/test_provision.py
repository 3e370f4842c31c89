"""A federation's first files: whole or not there, private where they should be, and of use to TLS and Flower."""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import ssl
import sys
import threading
import tomllib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fedstrata.errors import UserError
from fedstrata.sites import certificates
from fedstrata.sites import provision as module
from fedstrata.sites.provision import add_site, init
from fedstrata.sites.renewal import renew
from fedstrata.sites.settings import read_server, read_site

pytest.importorskip("cryptography")
ARABIC = "مستشفى.ب"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation to look at, not to change."""
    folder = tmp_path_factory.mktemp("federation") / "fed"
    init(folder, ["hospital-a", ARABIC], host="fed.example.org", port=1234, stream_port=1235)
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def shake(folder: Path, ca: Path, host: str) -> None:
    """A TLS handshake between the server of a federation and a site that asks for ``host``."""
    answers = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    answers.load_cert_chain(folder / "tls/server.pem", folder / "tls/server.key")
    asks = ssl.create_default_context(cafile=ca)
    asks.verify_flags |= ssl.VERIFY_X509_STRICT

    def serve(end: socket.socket) -> None:
        with suppress(OSError), answers.wrap_socket(end, server_side=True) as there:
            there.sendall(there.recv(8))

    one, other = socket.socketpair()
    with one, other:
        one.settimeout(10)
        other.settimeout(10)
        thread = threading.Thread(target=serve, args=[other])
        thread.start()
        try:
            with asks.wrap_socket(one, server_hostname=host) as here:
                here.sendall(b"strata")
                assert here.recv(8) == b"strata"
        finally:
            one.close()
            thread.join()


def test_what_is_written_is_valid(federation: Path) -> None:
    ours = read_server(federation)
    assert (ours.host, ours.bind, ours.port, ours.stream_port) == ("fed.example.org", "0.0.0.0", 1234, 1235)
    assert ours.sites == {name: federation / f"keys/{name}.pub" for name in ("hospital-a", ARABIC)}
    for name in ours.sites:
        theirs = read_site(federation / "sites" / name / "site.toml")
        assert (theirs.name, theirs.server, theirs.host) == (name, "fed.example.org:1234", "fed.example.org")
        assert theirs.key == federation / f"sites/{name}/{name}.key"
        assert theirs.ca.read_bytes() == ours.tls.ca.read_bytes()
        assert theirs.data.train == str(federation / f"sites/{name}/train.csv")


def test_a_default_that_stands_in_a_comment_is_the_default(federation: Path) -> None:
    site = federation / "sites/hospital-a/site.toml"
    content = tomllib.loads(site.read_text("utf-8"))
    bare = "format = 2\n" + "\n".join(
        f'{key} = "{content[key]}"' for key in ("name", "server", "ca", "key", "peers", "folder")
    )
    other = 'data.train = "train.csv"\napprove.runs = "any"'  # that is no default: a site without the table asks
    (site.parent / "bare.toml").write_text(f"{bare}\n{other}", "utf-8")
    assert read_site(site) == read_site(site.parent / "bare.toml")
    (site.parent / "bare.toml").unlink()


def test_what_stands_behind_a_comment_sign_is_legal(tmp_path: Path) -> None:
    init(tmp_path / "fed", ["a"])
    for path in (tmp_path / "fed/server.toml", tmp_path / "fed/sites/a/site.toml"):
        lines = path.read_text("utf-8").splitlines()
        path.write_text(
            "\n".join(line[2:] if line[:2] == "# " and " = " in line else line for line in lines), "utf-8"
        )
    assert read_server(tmp_path / "fed").bind == "127.0.0.1"
    (tmp_path / "fed/sites/a/minilm").mkdir()
    (tmp_path / "fed/sites/a/minilm/config.json").write_text("{}", "utf-8")
    theirs = read_site(tmp_path / "fed/sites/a")
    assert theirs.data.test == str(tmp_path / "fed/sites/a/test.csv")
    assert (theirs.data.limit, theirs.device.threads, theirs.limits.bytes_per_round) == (1000, 4, 500_000_000)
    assert theirs.allow.methods == ["fedavg", "fedbfpt"]


def test_private_is_private_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a mode set later is too late")

    monkeypatch.setattr(module.os, "chmod", refuse)
    mask = os.umask(0)
    try:
        written = init(tmp_path / "fed", ["a"])
    finally:
        os.umask(mask)
    private = {"tls/ca.key", "tls/server.key", "sites/a/a.key"}
    assert {path for path in written if path.stat().st_mode & 0o077 == 0} == {
        tmp_path / "fed" / p for p in private
    }
    for folder in ("tls", "sites/a"):
        assert (tmp_path / "fed" / folder).stat().st_mode & 0o777 == 0o700


def test_a_sites_private_key_is_in_its_own_folder_alone(federation: Path) -> None:
    for name in ("hospital-a", ARABIC):
        key = (federation / f"sites/{name}/{name}.key").read_bytes()
        assert [path for path, content in tree(federation).items() if content and key in content] == [
            f"sites/{name}/{name}.key"
        ]
    assert [path for path in tree(federation) if path.endswith("ca.key")] == ["tls/ca.key"]


def test_all_that_is_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    assert init(folder, ["a", "b"]) == sorted(path for path in folder.rglob("*") if path.is_file())
    before = tree(folder)
    changed = add_site(folder, "c")
    assert changed == sorted(
        folder / path for path, content in tree(folder).items() if content != before.get(path)
    )


def test_tls_knows_the_server_and_no_other(federation: Path, tmp_path: Path) -> None:
    ca = federation / "sites/hospital-a/ca.pem"
    for host in ("fed.example.org", "localhost", "127.0.0.1", "::1"):
        shake(federation, ca, host)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'other\.example\.org'"):
        shake(federation, ca, "other.example.org")
    init(tmp_path / "other", ["a"])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(federation, tmp_path / "other/tls/ca.pem", "127.0.0.1")
    shake(tmp_path / "other", tmp_path / "other/tls/ca.pem", "127.0.0.1")


def test_a_local_certificate_ends_after_a_year(federation: Path) -> None:
    from cryptography import x509

    serials = set()
    for name in ("ca", "server"):
        certificate = x509.load_pem_x509_certificate((federation / f"tls/{name}.pem").read_bytes())
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        assert usage.key_cert_sign == (name == "ca")
        limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert limits == x509.BasicConstraints(name == "ca", 0 if name == "ca" else None)
        serials.add(certificate.serial_number)
    assert len(serials) == 2
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(days=366)
    assert f"{certificate.not_valid_after_utc:%Y-%m-%d}" in (federation / "server.toml").read_text("utf-8")


def test_a_local_certificate_names_the_server_and_this_machine(federation: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate = x509.load_pem_x509_certificate((federation / "tls/server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)


def test_the_cas_key_signs_for_the_ca(federation: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key((federation / "tls/ca.key").read_bytes(), None)
    assert (
        key.public_key() == x509.load_pem_x509_certificate((federation / "tls/ca.pem").read_bytes()).public_key()
    )


def test_each_site_has_an_ecdsa_key_of_its_own(federation: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    keys = set()
    for name in ("hospital-a", ARABIC):
        private = load_ssh_private_key((federation / f"sites/{name}/{name}.key").read_bytes(), None)
        public = load_ssh_public_key((federation / f"keys/{name}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        keys.add((federation / f"keys/{name}.pub").read_bytes().split()[1])
    assert len(keys) == 2


def test_flower_reads_the_keys(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1")):
        monkeypatch.setenv(name, value)
    pytest.importorskip("flwr")
    supernode = importlib.import_module("flwr.supernode.cli.flower_supernode")
    register = importlib.import_module("flwr.cli.supernode.register")
    keys = importlib.import_module("flwr.supercore.primitives.asymmetric")
    for name in ("hospital-a", ARABIC):
        words = argparse.Namespace(
            auth_supernode_private_key=str(federation / f"sites/{name}/{name}.key"), auth_supernode_public_key=None
        )
        _, public = supernode._try_setup_client_authentication(words)
        assert register.try_load_public_key(federation / f"keys/{name}.pub") == keys.public_key_to_bytes(public)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"sites": []}, "no site is named"),
        ({"sites": ["a", "b", "a"]}, "'a' is the name of another"),
        ({"sites": ["a", "A"]}, "'A' is the name of another"),
        ({"sites": ["a/b"]}, "'a/b' is no name of a site"),
        ({"sites": ["a", ".."]}, "'..' is no name of a site"),
        ({"sites": ['a"b']}, "is no name of a site"),
        ({"host": "fed.example.org:9440"}, "host: 'fed.example.org:9440'"),
        ({"host": "0.0.0.0"}, "host: '0.0.0.0' cannot be reached"),
        ({"host": "fed_1.example.org"}, "host: 'fed_1.example.org' cannot be named in a certificate"),
        ({"port": 0}, "port: "),
        ({"port": 9441}, "stream_port: is 9441, as port is"),
        ({"message_port": 9440}, "message_port: is 9440, as port is"),
        ({"tls": (Path("no.pem"),) * 3}, "tls: ca: no.pem cannot be read"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, words: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        init(tmp_path / "fed", **{"sites": ["a"], **words})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not tree(tmp_path)


@pytest.mark.parametrize("name", ["server.toml", "tls", "keys", "sites"])
def test_nothing_is_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine", "utf-8")
    with pytest.raises(UserError, match="a federation already" if name == "server.toml" else name):
        init(tmp_path, ["a"])
    assert tree(tmp_path) == {name: b"mine"}


def test_a_folder_may_hold_other_things(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    init(tmp_path, ["a"])
    assert read_server(tmp_path).sites
    assert {path.split("/")[0] for path in tree(tmp_path)} == {"notes.txt", "server.toml", "tls", "keys", "sites"}


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/fed"):
        with pytest.raises(UserError, match="cannot be written"):
            init(folder, ["a"])


def _fails(monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: BaseException) -> None:
    """Let call number ``at`` of a function of ``os`` fail."""
    real: Callable[..., Any] = getattr(os, name)
    calls = []

    def call(*words: Any, **named: Any) -> Any:
        calls.append(words)
        if len(calls) == at:
            raise error
        return real(*words, **named)

    monkeypatch.setattr(os, name, call)


FAILURES = [("fsync", at) for at in (1, 4)] + [("replace", at) for at in (1, 2, 3)]


@pytest.mark.parametrize(("name", "at"), [*FAILURES, ("replace", 4)])
@pytest.mark.parametrize("held", [False, True])
def test_a_failure_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int, held: bool
) -> None:
    if held:
        (tmp_path / "fed").mkdir()
        (tmp_path / "fed/notes.txt").touch()
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        _fails(patch, name, at, OSError(28, "disk full"))
        with pytest.raises(UserError, match=r"cannot be written \(disk full\)"):
            init(tmp_path / "fed", ["a"])
    assert tree(tmp_path) == before
    init(tmp_path / "fed", ["a"])


@pytest.mark.parametrize(("name", "at"), FAILURES)
def test_a_site_is_added_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    init(tmp_path, ["a"])
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        _fails(patch, name, at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            add_site(tmp_path, "b")
    assert tree(tmp_path) == before
    add_site(tmp_path, "b")


def test_a_site_that_is_named_in_the_settings_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init(tmp_path, ["a"])
    real = os.replace

    def late(built: Path, place: Path) -> None:
        real(built, place)
        if place.name == "server.toml":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(KeyboardInterrupt):
        add_site(tmp_path, "b")
    assert list(read_server(tmp_path).sites) == ["a", "b"]
    assert read_site(tmp_path / "sites/b").name == "b"


def test_an_added_site_is_like_the_first(tmp_path: Path) -> None:
    init(tmp_path, ["a"], host="::1", port=99)
    (tmp_path / "server.toml").chmod(0o640)
    add_site(tmp_path, ARABIC)
    assert list(read_server(tmp_path).sites) == ["a", ARABIC]
    assert (tmp_path / "server.toml").stat().st_mode & 0o777 == 0o640
    theirs = read_site(tmp_path / "sites" / ARABIC)
    assert theirs.server == "[::1]:99"
    assert theirs.key.stat().st_mode & 0o777 == 0o600
    assert theirs.key.parent.stat().st_mode & 0o777 == 0o700
    shake(tmp_path, theirs.ca, "::1")
    first = (tmp_path / "sites/a/site.toml").read_text("utf-8")
    assert (tmp_path / f"sites/{ARABIC}/site.toml").read_text("utf-8") == first.replace(
        '"a"', f'"{ARABIC}"'
    ).replace('"a.key"', f'"{ARABIC}.key"')


HEAD = (
    'format = 2\nhost = "fed"\n'
    'tls = { ca = "tls/ca.pem", certificate = "tls/server.pem", key = "tls/server.key" }\n'
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[sites]\na = "keys/a.pub"', 'b = "keys/b.pub"'),
        ('[sites] # ours\na = "keys/a.pub"\n', 'b = "keys/b.pub"\n'),
        ('[ sites ]\n\n# the first\na = "keys/a.pub" # [x]\n', 'b = "keys/b.pub"\n\n# the end\n'),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_settings_file_keeps_its_own_text(tmp_path: Path, before: str, after: str, newline: str) -> None:
    init(tmp_path, ["a"])
    rest = after.removeprefix('b = "keys/b.pub"').removeprefix("\n")
    text = (HEAD + before + rest).replace("\n", newline)
    (tmp_path / "server.toml").write_bytes(text.encode())
    add_site(tmp_path, "b")
    joined = HEAD + before + ("" if before.endswith("\n") else "\n") + after
    assert (tmp_path / "server.toml").read_bytes() == joined.replace("\n", newline).encode()


def test_a_line_goes_before_the_next_table(tmp_path: Path) -> None:
    init(tmp_path, ["a"])
    path = tmp_path / "server.toml"
    head, tls, sites = path.read_text("utf-8").partition("[tls]")
    files, _, lines = sites.partition("# Who")
    path.write_text(f"{head}\n# Who{lines}\n# next\n{tls}{files}", "utf-8")
    add_site(tmp_path, "b")
    assert 'a = "keys/a.pub"\nb = "keys/b.pub"\n\n# next\n[tls]' in path.read_text("utf-8")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('sites = { a = "keys/a.pub" }', 'sites = { a = "keys/a.pub", b = "keys/b.pub"}'),
        ('sites.a = "keys/a.pub"', 'sites.a = "keys/a.pub"\nsites.b = "keys/b.pub"'),
    ],
)
def test_a_table_of_another_form_gets_the_site_too(tmp_path: Path, before: str, after: str) -> None:
    init(tmp_path, ["a"])
    (tmp_path / "server.toml").write_text(f"{before}\n{HEAD}", "utf-8")
    add_site(tmp_path, "b")
    assert (tmp_path / "server.toml").read_text("utf-8") == f"{after}\n{HEAD}"


def test_settings_that_cannot_be_edited_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init(tmp_path, ["a"])
    before = tree(tmp_path)
    monkeypatch.setattr("tomlkit.dumps", lambda document: 'host = "elsewhere"')
    with pytest.raises(UserError, match=r"cannot be edited; write its sites as one table \[sites\]"):
        add_site(tmp_path, "b")
    assert tree(tmp_path) == before


def test_a_site_may_have_the_name_of_a_file(tmp_path: Path) -> None:
    init(tmp_path, ["server.toml", "a.pub", "a"])
    for name in ("site.toml", "ca.pem", "ca", "site", "keys", "b.pub", "b"):
        add_site(tmp_path / "server.toml", name)
        assert read_site(tmp_path / "sites" / name).key == tmp_path / f"sites/{name}/{name}.key"
    assert len(read_server(tmp_path).sites) == 10


@pytest.mark.parametrize("name", ["a", "A", "../b", ""])
def test_an_added_site_has_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    init(tmp_path, ["a"])
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"name"):
        add_site(tmp_path, name)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["sites/b", "keys/b.pub"])
def test_an_added_site_writes_over_nothing(tmp_path: Path, place: str) -> None:
    init(tmp_path, ["a"])
    (tmp_path / place).touch()
    before = tree(tmp_path)
    with pytest.raises(UserError, match="already exists"):
        add_site(tmp_path, "b")
    assert tree(tmp_path) == before


def test_a_site_is_added_to_a_federation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        add_site(tmp_path, "b")


def own(folder: Path) -> tuple[Path, Path, Path]:
    """The certificate files of a federation, as if they were somebody's own."""
    return folder / "tls/ca.pem", folder / "tls/server.pem", folder / "tls/server.key"


def test_a_certificate_of_ones_own(federation: Path, tmp_path: Path) -> None:
    written = init(tmp_path, ["a"], host="fed.example.org", tls=own(federation))
    assert [path.name for path in written if path.parent.name == "tls"] == ["ca.pem", "server.key", "server.pem"]
    assert "local tests" not in (tmp_path / "server.toml").read_text("utf-8")
    assert (tmp_path / "tls/server.key").stat().st_mode & 0o777 == 0o600
    shake(tmp_path, tmp_path / "sites/a/ca.pem", "fed.example.org")


def _plain(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """A certificate that signs itself and has its name in the subject alone; and its key under a passphrase."""
    from datetime import UTC, datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "plain.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for file, how in (
        ("plain.key", serialization.NoEncryption()),
        ("locked.key", serialization.BestAvailableEncryption(b"secret")),
    ):
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
        (folder / file).write_bytes(private)
    return folder / "plain.pem", folder / "plain.pem", folder / "plain.key"


def test_a_certificate_that_does_not_serve(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, certificate, key = own(federation)
    init(tmp_path / "other", ["a"])
    other = own(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "YEAR", -timedelta(hours=1))
        init(tmp_path / "old", ["a"])
    plain = _plain(tmp_path, "fed.example.org")
    for files, host, expected in (
        ((key, certificate, key), "fed.example.org", f"tls: ca: {key} holds no certificate"),
        ((ca, key, key), "fed.example.org", f"tls: certificate: {key} holds no certificate"),
        ((ca, certificate, ca), "fed.example.org", f"tls: key: {ca} holds no private key"),
        ((*plain[:2], tmp_path / "locked.key"), "fed.example.org", "without passphrase"),
        ((ca, certificate, other[2]), "fed.example.org", f"tls: key: {other[2]} is not the key of {certificate}"),
        ((ca, certificate, key), "else.example.org", "not valid for 'else.example.org'"),
        ((ca, certificate, key), "192.0.2.7", "not valid for '192.0.2.7'"),
        ((other[0], certificate, key), "fed.example.org", f"a site that trusts {other[0]}"),
        (own(tmp_path / "old"), "127.0.0.1", "has expired"),
        (plain, "fed.example.org", "not valid for 'fed.example.org'"),
    ):
        with pytest.raises(UserError) as caught:
            init(tmp_path / "fed", ["a"], host=host, tls=files)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("library", ["cryptography", "trustme", "tomlkit"])
def test_without_its_libraries_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    init(tmp_path / "there", ["a"])
    monkeypatch.setitem(sys.modules, library, None)
    there = tmp_path / "there"
    for call in (lambda: init(tmp_path / "fed", ["a"]), lambda: add_site(there, "b"), lambda: renew(there)):
        with pytest.raises(UserError, match=r"needs the extra 'flower': pip install 'fedstrata\[flower\]'"):
            call()
    assert not (tmp_path / "fed").exists()
