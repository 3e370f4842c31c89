"""Certificates of sites, as an option: the server's ports take no connection without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit

from fedstrata import UserError
from fedstrata.sites import message_client
from fedstrata.sites.federation import _tls
from fedstrata.sites.listening import ClientTLS
from fedstrata.sites.message_client import MessageClient
from fedstrata.sites.message_server import MessageServer
from fedstrata.sites.provision import add_site, init
from fedstrata.sites.renewal import renew
from fedstrata.sites.serve import _client_tls
from fedstrata.sites.settings import read_server, read_site

import grpc  # isort: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("certified") / "federation"
    init(home, ["a", "b"], client_certificates=True)
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[MessageServer]:
    settings = read_server(home)
    assert settings.tls.clients == home / "tls" / "clients.pem"
    with MessageServer("127.0.0.1:0", _tls(settings, True), {"a": "x", "b": "y", "c": "z"}) as server:
        yield server


def own(home: Path, name: str) -> ClientTLS:
    return _client_tls(read_site(home / "sites" / name))


def known(server: MessageServer, site: str, token: str, tls: ClientTLS) -> bool:
    """Whether the server takes a site for who it says it is: then it waits for a message."""
    client = MessageClient(f"127.0.0.1:{server.port}", site, token, tls)
    fetch = client.channel.stream_stream(f"/{message_client.SERVICE}/{message_client.FETCH}")
    before = server.boxes[site].fetch
    received = fetch(iter(()), metadata=client.metadata, timeout=120)
    try:
        while not received.done():
            if server.boxes[site].fetch not in (None, before):
                return True
            time.sleep(0.01)
        assert received.code() is grpc.StatusCode.UNAUTHENTICATED
        return False
    finally:
        client.close()


def test_a_site_with_its_own_certificate_is_let_in(home: Path, server: MessageServer) -> None:
    assert known(server, "a", "x", own(home, "a"))


def test_a_site_with_a_renewed_certificate_is_let_in(home: Path, server: MessageServer) -> None:
    path = home / "sites" / "b" / "b.pem"
    before = path.read_bytes()
    renew(home, path)
    assert path.read_bytes() != before
    assert known(server, "b", "y", own(home, "b"))


def test_a_token_with_another_site_s_certificate_is_refused(home: Path, server: MessageServer) -> None:
    assert not known(server, "a", "x", own(home, "b"))


def test_without_a_certificate_or_with_a_foreign_one_nobody_connects(
    home: Path, server: MessageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "other", ["a"], client_certificates=True)
    foreign = own(tmp_path / "other", "a")
    ca = (home / "tls" / "ca.pem").read_bytes()
    assert isinstance(foreign, tuple)
    for tls, lets_in in ((ca, False), ((ca, *foreign[1:]), False), (own(home, "a"), True)):
        monkeypatch.setattr(message_client, "CONNECT_SECONDS", 120.0 if lets_in else 2.0)
        client = MessageClient(f"127.0.0.1:{server.port}", "a", "x", tls)
        assert client.connects() is lets_in
        client.close()


def test_a_new_site_gets_one_too(tmp_path: Path) -> None:
    home = tmp_path / "federation"
    init(home, ["a"], client_certificates=True)
    add_site(home, "c")
    site = read_site(home / "sites" / "c")
    assert site.certificate_key is not None
    assert site.certificate_key.stat().st_mode & 0o777 == 0o600
    (home / "tls" / "clients.key").unlink()
    with pytest.raises(UserError, match=r"clients.key: is not there; it signs the new site's certificate"):
        add_site(home, "d")
    assert not (home / "sites" / "d").exists()
    with pytest.raises(UserError, match="too long for a certificate"):
        init(tmp_path / "long", ["x" * 65], client_certificates=True)


def test_certificate_and_key_go_together(home: Path, tmp_path: Path) -> None:
    path = home / "sites" / "b" / "site.toml"
    before = path.read_text("utf-8")
    table = tomlkit.parse(before)
    del table["certificate_key"]
    path.write_text(tomlkit.dumps(table), "utf-8")
    with pytest.raises(UserError, match="certificate: goes with certificate_key"):
        read_site(path)
    path.write_text(before, "utf-8")
