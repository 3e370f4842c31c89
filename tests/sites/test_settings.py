"""The settings of a server and of a site: what is accepted, and one clear sentence for everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from fedstrata.errors import UserError
from fedstrata.job import tables as job
from fedstrata.sites import checks, settings
from fedstrata.sites.checks import join_address, loopback
from fedstrata.sites.settings import read_server, read_site

Writes = Callable[..., Path]


@pytest.fixture
def server(tmp_path: Path) -> Writes:
    """Writes a ``server.toml`` and its files: ``server({"port": 1}, tls={"ca": "other"})``."""
    for name in ("tls/ca.pem", "tls/server.pem", "tls/server.key", "keys/a.pub", "keys/b.pub"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"ecdsa-sha2-nistp384 {name} comment\n", "utf-8")
        path.chmod(0o600)

    def write(words: dict[str, Any] | None = None, /, **tables: Any) -> Path:
        content: dict[str, Any] = {
            "format": 2,
            "host": "fed.example.org",
            "tls": {"ca": "tls/ca.pem", "certificate": "tls/server.pem", "key": "tls/server.key"},
            "sites": {"a": "keys/a.pub"},
            **(words or {}),
        }
        return _written(tmp_path / "server.toml", content, tables)

    return write


@pytest.fixture
def site(tmp_path: Path) -> Writes:
    """Writes a ``site.toml`` and its files."""
    (tmp_path / "ca.pem").touch()
    (tmp_path / "a.key").write_bytes(checks.OPENSSH)
    (tmp_path / "a.key").chmod(0o600)

    def write(words: dict[str, Any] | None = None, /, **tables: Any) -> Path:
        content: dict[str, Any] = {
            "format": 2,
            "name": "a",
            "server": "fed.example.org:9440",
            "ca": "ca.pem",
            "key": "a.key",
            "folder": "state",
            "data": {"train": "train.csv"},
            **(words or {}),
        }
        return _written(tmp_path / "site.toml", content, tables)

    return write


def _written(path: Path, content: dict[str, Any], tables: dict[str, Any]) -> Path:
    for key, table in tables.items():
        content[key] = {**content.get(key, {}), **table} if isinstance(table, dict) else table
    path.write_text(tomlkit.dumps({key: value for key, value in content.items() if value is not None}), "utf-8")
    return path


def test_paths_are_absolute_wherever_it_is_read(
    server: Writes, site: Writes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server(), site()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ours = read_server(Path(".."))
    theirs = read_site(Path("../site.toml"))
    assert ours == read_server(tmp_path / "server.toml")
    assert ours.home == theirs.home == tmp_path
    assert (ours.tls.ca, ours.tls.key) == (tmp_path / "tls/ca.pem", tmp_path / "tls/server.key")
    assert ours.sites == {"a": tmp_path / "keys/a.pub"}
    assert (theirs.ca, theirs.key, theirs.folder) == tuple(
        tmp_path / name for name in ("ca.pem", "a.key", "state")
    )
    assert theirs.data.train == str(tmp_path / "train.csv")


def test_what_is_left_out_has_a_default(server: Writes, site: Writes) -> None:
    ours, theirs = read_server(server()), read_site(site())
    assert (ours.port, ours.stream_port, ours.message_port) == (9440, 9441, 9442)
    assert (theirs.data.text, theirs.data.label, theirs.data.test) == ("text", "label", None)
    assert (theirs.device.name, theirs.device.threads) == ("auto", None)
    assert (theirs.allow.payloads, theirs.allow.methods) == (["weights"], None)
    assert (theirs.limits.bytes_per_round, theirs.limits.min_examples) == (None, 8)


def test_every_key_may_be_set(server: Writes, site: Writes) -> None:
    ours = read_server(
        server({"bind": "10.0.0.1", "port": 1, "stream_port": 65535, "message_port": 2}, sites={"b": "keys/b.pub"})
    )
    assert (ours.bind, ours.port, ours.stream_port, ours.message_port) == ("10.0.0.1", 1, 65535, 2)
    assert list(ours.sites) == ["a", "b"]
    theirs = read_site(
        site(
            data={"test": ["x.csv"], "text": ["a", "b"], "columns": ["a"], "limit": 3, "documents": "blank"}
            | {"delimiter": ";", "encoding": "cp1252"},
            device={"name": "cuda", "threads": 2},
            allow={"payloads": ["weights", "hidden_states", "activations"], "methods": ["fedbfpt"]},
            limits={"bytes_per_round": 500_000_000, "min_examples": 50},
        )
    )
    assert theirs.data.text == ["a", "b"]
    assert theirs.device.threads == 2
    assert theirs.allow.methods == ["fedbfpt"]
    assert theirs.limits.bytes_per_round == 500_000_000


@pytest.mark.parametrize(
    ("host", "bind"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("::1", "::1"),
        ("fed.example.org", "0.0.0.0"),
        ("192.0.2.7", "0.0.0.0"),
        ("2001:db8::7", "::"),
    ],
)
def test_a_server_listens_everywhere_unless_it_is_for_this_machine(server: Writes, host: str, bind: str) -> None:
    assert read_server(server({"host": host})).bind == bind


def test_loopback() -> None:
    assert all(map(loopback, ("localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(loopback, ("", "fed.example.org", "localhost.example.org", "128.0.0.1", "::2", "0.0.0.0")))


@pytest.mark.parametrize(
    ("server", "host"),
    [("fed_1.example.org:9440", "fed_1.example.org"), ("127.0.0.1:1", "127.0.0.1"), ("[::1]:65535", "::1")],
)
def test_a_site_knows_its_servers_host(site: Writes, server: str, host: str) -> None:
    theirs = read_site(site({"server": server}))
    assert theirs.host == host
    assert join_address(host, int(server.rpartition(":")[2])) == server


def test_sources_are_paths_where_they_can_be(site: Writes, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    named = {
        "one": "imdb",
        "two": ["rows", "org/set:config#test", "../rows", "sub/missing.jsonl", "demo:hpo-train"],
    }
    assert read_site(site(data={"train": named})).data.train == {
        "one": "imdb",
        "two": [
            str(tmp_path / "rows"),
            "org/set:config#test",
            str(tmp_path.parent / "rows"),
            str(tmp_path / "sub/missing.jsonl"),
            "demo:hpo-train",
        ],
    }


@pytest.mark.parametrize(
    ("words", "tables", "expected"),
    [
        ({"host": None}, {}, ["host: is missing"]),
        ({"host": "https://fed.example.org"}, {}, ["host: 'https://fed", "without port"]),
        ({"host": "fed.example.org:9440"}, {}, ["host: 'fed.example.org:9440'", "without port"]),
        ({"host": "192.0.2.300"}, {}, ["host: '192.0.2.300'"]),
        ({"host": "fed..org"}, {}, ["host: 'fed..org'"]),
        ({"host": ""}, {}, ["host: ''"]),
        ({"host": "0.0.0.0"}, {}, ["host: '0.0.0.0'", "cannot be reached"]),
        ({"format": None}, {}, ["format: is missing; expected 2", "payloads", "write format = 2"]),
        ({"format": 1}, {}, ["format: is 1; expected 2"]),
        ({"format": 3}, {}, ["format: is 3; expected 2"]),
        ({"format": True}, {}, ["format: is True; expected 2"]),
        ({"format": "2"}, {}, ["format: is '2'; expected 2"]),
        ({"port": 0}, {}, ["port: must be 1 or more, found 0"]),
        ({"bind": "*"}, {}, ["bind: '*'"]),
        ({"port": 65536}, {}, ["port", "65535", "found 65536"]),
        ({"port": "9440"}, {}, ["port: must be a whole number, found '9440'"]),
        ({"port": 9441}, {}, ["stream_port: is 9441, as port is"]),
        ({"stream_port": 9440}, {}, ["stream_port: is 9440, as port is"]),
        ({"port": 9442}, {}, ["message_port: is 9442, as port is"]),
        ({"message_port": 9441}, {}, ["message_port: is 9441, as stream_port is"]),
        ({"stream_port": True}, {}, ["stream_port: must be a whole number, found true"]),
        ({"strem_port": 1}, {}, ["strem_port: no such key", "did you mean 'stream_port'?"]),
        ({"tls": None}, {}, ["tls: is missing"]),
        ({"tls": "tls"}, {}, ["tls: must be a table ([tls]), found 'tls'"]),
        ({}, {"tls": {"cert": "x"}}, ["[tls] cert: no such key", "certificate"]),
        ({}, {"tls": {"ca": 3}}, ["[tls] ca: 3 is no path"]),
        ({}, {"tls": {"ca": ""}}, ["[tls] ca: '' is no path"]),
        ({}, {"tls": {"ca": "no.pem"}}, ["[tls] ca: ", "/no.pem cannot be read", "No such file"]),
        ({}, {"tls": {"certificate": "tls"}}, ["[tls] certificate: ", "/tls cannot be read", "directory"]),
        ({}, {"tls": {"key": "no.key"}}, ["[tls] key: ", "/no.key cannot be read"]),
        ({"sites": {}}, {}, ["[sites]: is empty"]),
        ({"sites": ["a"]}, {}, ["sites: must be a table"]),
        ({}, {"sites": {"b": "keys/c.pub"}}, ["[sites] b: ", "/keys/c.pub cannot be read"]),
        ({}, {"sites": {"b": "server.toml"}}, ["[sites] b: ", "no public key", "ecdsa-sha2-nistp"]),
        ({}, {"sites": {"b": "keys/a.pub"}}, ["[sites] b: ", "the key of a too"]),
        ({}, {"sites": {"../b": "keys/b.pub"}}, ["[sites] ../b: '../b' is no name of a site", "letters"]),
        ({}, {"sites": {".b": "keys/b.pub"}}, ["'.b' is no name of a site"]),
        ({}, {"sites": {"b c": "keys/b.pub"}}, ["'b c' is no name of a site"]),
        ({}, {"sites": {"b" * 101: "keys/b.pub"}}, ["is no name of a site", "at most 100"]),
    ],
)
def test_a_servers_wrong_word_gets_one_sentence(
    server: Writes, words: dict[str, Any], tables: dict[str, Any], expected: list[str]
) -> None:
    _refused(read_server, server(words, **tables), expected)


@pytest.mark.parametrize(
    ("words", "tables", "expected"),
    [
        ({"name": None}, {}, ["name: is missing"]),
        ({"name": ".."}, {}, ["name: '..' is no name of a site"]),
        ({"name": ""}, {}, ["name: '' is no name of a site"]),
        ({"server": "fed.example.org"}, {}, ["server: 'fed.example.org' is no address", "host:port"]),
        ({"server": "https://fed.example.org:9440"}, {}, ["server: 'https:"]),
        ({"server": "fed.example.org:0"}, {}, ["server: 'fed.example.org:0'"]),
        ({"server": "fed.example.org:65536"}, {}, ["server: 'fed.example.org:65536'"]),
        ({"server": "::1:9440"}, {}, ["server: '::1:9440'", "[::1]:9440"]),
        ({"server": "0.0.0.0:9440"}, {}, ["server: '0.0.0.0' cannot be reached"]),
        (
            {"format": None},
            {"allow": {"exchanges": ["features"]}},
            ["format: is missing; expected 2: since format 2 the key [allow] exchanges", "'hidden_states'"],
        ),
        ({}, {"allow": {"exchanges": ["weights"]}}, ["[allow] exchanges: is now called payloads"]),
        (
            {},
            {"allow": {"exchanges": ["weights", "features"]}},
            ["is now called payloads, and 'features' is now 'hidden_states'"],
        ),
        (
            {},
            {"allow": {"payloads": ["weights", "features"]}},
            ["[allow] payloads: 'features' is now 'hidden_states'"],
        ),
        ({"ca": "no.pem"}, {}, ["ca: ", "/no.pem cannot be read"]),
        ({"key": "no.key"}, {}, ["key: ", "/no.key cannot be read"]),
        ({"folder": "ca.pem"}, {}, ["folder: ", "/ca.pem is a file"]),
        ({"data": None}, {}, ["data: is missing"]),
        ({"data": {}}, {}, ["[data] train: is missing"]),
        ({}, {"data": {"train": 3}}, ["[data] train", "string", "found 3"]),
        ({}, {"data": {"train": ["a.csv", ""]}}, ["[data] train: '' is no path"]),
        ({}, {"data": {"train": []}}, ["[data] train: [] names no rows; expected a file, a folder"]),
        ({}, {"data": {"train": {}}}, ["[data] train: {} names no rows"]),
        ({}, {"data": {"train": {"one": []}}}, ["[data] train: [] names no rows"]),
        ({}, {"data": {"test": []}}, ["[data] test: [] names no rows"]),
        ({"folder": "a\0"}, {}, [r"folder: 'a\x00' is no path: it has a zero byte"]),
        ({"peers": "a\0"}, {}, [r"peers: 'a\x00' is no path: it has a zero byte"]),
        ({}, {"data": {"train": "a\0.csv"}}, [r"[data] train: 'a\x00.csv' is no path"]),
        ({}, {"data": {"lable": "x"}}, ["[data] lable: no such key", "did you mean 'label'?"]),
        ({}, {"data": {"limit": 0}}, ["[data] limit", "found 0"]),
        ({}, {"data": {"delimiter": "ab"}}, ["[data] delimiter: 'ab' is no delimiter"]),
        ({}, {"data": {"encoding": "x"}}, ["[data] encoding: 'x' is no encoding"]),
        ({}, {"data": {"documents": "line"}}, ["[data] documents: 'line'", "did you mean 'lines'?"]),
        ({}, {"device": {"name": "gpu"}}, ["[device] name: 'gpu' is invalid", "cuda"]),
        ({}, {"device": {"threads": 0}}, ["[device] threads", "found 0"]),
        ({}, {"allow": {"payloads": ["weight"]}}, ["[allow] payloads: 'weight'", "did you mean 'weights'?"]),
        ({}, {"allow": {"payloads": "weights"}}, ["[allow] payloads", "list", "found 'weights'"]),
        ({}, {"allow": {"methods": ["fedbftp"]}}, ["[allow] methods: 'fedbftp'", "did you mean 'fedbfpt'?"]),
        ({}, {"limits": {"bytes_per_round": 5e8}}, ["[limits] bytes_per_round: must be a whole number"]),
        ({}, {"limits": {"min_examples": 0}}, ["[limits] min_examples", "found 0"]),
        ({}, {"limit": {"min_examples": 1}}, ["limit: no such key", "did you mean 'limits'?"]),
    ],
)
def test_a_sites_wrong_word_gets_one_sentence(
    site: Writes, words: dict[str, Any], tables: dict[str, Any], expected: list[str]
) -> None:
    _refused(read_site, site(words, **tables), expected)


def _refused(read: Callable[[Path], Any], path: Path, expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ")
    assert "\n" not in sentence
    for word in expected:
        assert word in sentence


def test_two_sites_share_no_key_under_another_comment(server: Writes, tmp_path: Path) -> None:
    (tmp_path / "keys/b.pub").write_text(
        (tmp_path / "keys/a.pub").read_text("utf-8").replace("comment", "b"), "utf-8"
    )
    _refused(read_server, server(sites={"b": "keys/b.pub"}), ["[sites] b: ", "the key of a too"])


def test_names_may_be_in_any_script(server: Writes, site: Writes) -> None:
    for name in ("مستشفى-١", "clinique_é", "st.mary", "b" * 100):
        assert name in read_server(server(sites={name: "keys/b.pub"})).sites
        assert read_site(site({"name": name})).name == name


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610])
def test_a_private_key_is_its_owners_alone(server: Writes, site: Writes, tmp_path: Path, mode: int) -> None:
    for read, path, key in (
        (read_server, server(), tmp_path / "tls/server.key"),
        (read_site, site(), tmp_path / "a.key"),
    ):
        key.chmod(mode)
        _refused(read, path, ["key: ", f"mode {mode:o}", f"chmod 600 {key}"])
        key.chmod(0o400)
        read(path)


def test_a_sites_key_is_in_openssh_form(site: Writes, tmp_path: Path) -> None:
    (tmp_path / "a.key").write_text("-----BEGIN PRIVATE KEY-----", "utf-8")
    _refused(read_site, site(), ["key: ", "a.key is no private key in OpenSSH's form"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[tls\nca = 1", ["is not TOML", "line 1"]),
        (b"\xff\xfehost", ["is not UTF-8", "byte 0"]),
        (b'host = "a"\nhost = "b"', ["is not TOML"]),
        (None, ["cannot be read", "No such file"]),
    ],
)
def test_a_file_that_is_no_settings(tmp_path: Path, content: bytes | None, expected: list[str]) -> None:
    path = tmp_path / "server.toml"
    if content is not None:
        path.write_bytes(content)
    _refused(read_server, path, expected)
    _refused(read_site, path, expected)


def test_a_site_uses_a_jobs_words() -> None:
    """What a site says of its data, it says with the keys of a job."""
    for name, field in settings.Data.model_fields.items():
        if name not in ("train", "test"):
            theirs = job.Data.model_fields[name]
            assert (field.default, repr(field.annotation)) == (theirs.default, repr(theirs.annotation))


def test_settings_load_nothing_heavy() -> None:
    command = "import sys, fedstrata.sites.settings, fedstrata.sites.provision; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, env=os.environ
    )
    heavy = {"torch", "transformers", "flwr", "cryptography", "grpc", "trustme", "tomlkit"}
    assert not heavy & set(loaded.stdout.split())
