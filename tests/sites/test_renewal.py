"""Certificates signed for another year: the key and the names stay, and nothing of another CA is signed."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedstrata.errors import UserError
from fedstrata.sites import certificates
from fedstrata.sites.certificates import check_server, check_site
from fedstrata.sites.provision import init
from fedstrata.sites.renewal import renew
from fedstrata.sites.settings import read_server, read_site

x509 = pytest.importorskip("cryptography.x509")


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A federation whose certificates ended an hour ago."""
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "YEAR", -timedelta(hours=1))
        init(tmp_path / "fed", ["a", "b"], client_certificates=True)
    return tmp_path / "fed"


def test_a_server_is_trusted_again_with_its_old_key(ended: Path) -> None:
    settings = read_server(ended)
    key, mode = settings.tls.key.read_bytes(), settings.tls.certificate.stat().st_mode
    with pytest.raises(UserError, match="has expired"):
        check_server(settings)
    path, end = renew(ended / "server.toml")
    assert path == settings.tls.certificate
    assert abs(end - datetime.now(UTC) - timedelta(days=365)) < timedelta(minutes=5)
    check_server(settings)
    assert settings.tls.key.read_bytes() == key
    assert path.stat().st_mode == mode


def test_a_site_is_let_in_again_by_the_certificate_that_it_sent(ended: Path, tmp_path: Path) -> None:
    site, sent = read_site(ended / "sites" / "a"), tmp_path / "sent.pem"
    assert site.certificate is not None
    with pytest.raises(UserError, match="has expired"):
        check_site(site)
    shutil.copy(site.certificate, sent)
    renew(ended, sent)
    old, new = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (site.certificate, sent))
    assert new.serial_number != old.serial_number
    assert [(each.value, each.critical) for each in new.extensions] == [
        (each.value, each.critical) for each in old.extensions
    ]
    assert (new.subject, new.issuer, new.public_key()) == (old.subject, old.issuer, old.public_key())
    site.certificate.write_bytes(sent.read_bytes())
    check_site(site)


def test_what_is_not_renewed_stays_as_it_is(ended: Path, tmp_path: Path) -> None:
    init(tmp_path / "plain", ["a"])
    init(tmp_path / "other", ["a"], client_certificates=True)
    others, own = tmp_path / "other/sites/a/a.pem", ended / "sites/a/a.pem"
    gone = ended / "sites/b/b.pem"
    text = (ended / "server.toml").read_text("utf-8")
    (ended / "server.toml").write_text("".join(x for x in text.splitlines(True) if "keys/b.pub" not in x), "utf-8")
    for folder, certificate, expected in (
        (tmp_path / "plain", own, "its sites have no certificates"),
        (ended, others, f"was not signed by {ended / 'tls/clients.pem'}"),
        (ended, ended / "tls/server.pem", "was not signed by"),
        (ended, ended / "tls/server.key", "holds no certificate in PEM form"),
        (ended, ended / "nothing.pem", "cannot be read"),
        (ended, gone, f"{gone}: is for b; expected a site that server.toml lists"),
    ):
        before = certificate.read_bytes() if certificate.exists() else None
        with pytest.raises(UserError, match=r".") as caught:
            renew(folder, certificate)
        assert expected in str(caught.value)
        assert before == (certificate.read_bytes() if certificate.exists() else None)


def test_the_key_of_the_ca_signs_or_it_is_named(ended: Path) -> None:
    key, certificate = ended / "tls/ca.key", ended / "tls/server.pem"
    before = certificate.read_bytes()
    shutil.copy(ended / "tls/clients.key", key)
    with pytest.raises(UserError, match=f"{key}: is not the key of"):
        renew(ended)
    key.write_bytes(b"no key")
    with pytest.raises(UserError, match=f"{key}: holds no private key"):
        renew(ended)
    key.unlink()
    with pytest.raises(UserError, match=f"{key}: cannot be read"):
        renew(ended)
    assert certificate.read_bytes() == before
    assert not list(certificate.parent.glob(".*"))


def test_a_key_that_stands_with_its_certificate_is_not_lost(ended: Path) -> None:
    path = ended / "sites/a/a.pem"
    both = path.read_bytes() + (ended / "sites/a/a.tls.key").read_bytes()
    path.write_bytes(both)
    with pytest.raises(UserError, match="holds more than a certificate, such as its key"):
        renew(ended, path)
    assert path.read_bytes() == both


def test_no_certificate_outlives_its_ca(ended: Path) -> None:
    from cryptography.hazmat.primitives import hashes, serialization

    path = ended / "tls/ca.pem"
    key = serialization.load_pem_private_key((ended / "tls/ca.key").read_bytes(), None)
    old = x509.load_pem_x509_certificate(path.read_bytes())
    for days in (9, -1):
        builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(datetime.now(UTC) - timedelta(days=2))
        builder = builder.not_valid_after(datetime.now(UTC) + timedelta(days=days))
        for each in old.extensions:
            builder = builder.add_extension(each.value, each.critical)
        path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        if days > 0:
            assert abs(renew(ended)[1] - datetime.now(UTC) - timedelta(days=days)) < timedelta(minutes=5)
        else:
            with pytest.raises(UserError, match=f"{path}: has expired"):
                renew(ended)
