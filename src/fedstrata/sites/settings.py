"""The settings of a federation: ``server.toml`` for the server, ``site.toml`` for each site, checked when read.

A relative path in them starts at the folder of its file; as read, every path is absolute.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedstrata.data.forms import FORMS, WORD_FORMS
from fedstrata.data.read import HUB_ID
from fedstrata.errors import UserError, did_you_mean

OPENSSH = b"-----BEGIN OPENSSH PRIVATE KEY-----"
ECDSA = b"ecdsa-sha2-nistp"


def loopback(host: str) -> bool:
    """Whether a host is this machine and nobody else reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address(host: str, port: int) -> str:
    """Host and port as one word."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def site_name(name: str) -> str:
    """A site's name, if it is one.

    Raises:
        ValueError: it is not.
    """
    if not re.fullmatch(r"(?!\.)[\w.-]{1,100}", name):
        raise ValueError(
            f"{name!r} names no site; legal: at most 100 letters, digits, -, _ and ., the first of them no ."
        )
    return name


def _bind(host: str) -> str:
    """A host; as a name, one whose last word is a number would be a mistyped address."""
    words = host.split(".")
    try:
        ip_address(host)
    except ValueError:
        word = re.compile(r"(?!-)[\w-]{1,63}(?<!-)", re.ASCII)
        if not all(map(word.fullmatch, words)) or len(host) > 253 or words[-1].isdigit():
            raise ValueError(f"{host!r} is no host; legal: a name or an IP address, without port") from None
    return host


def _host(host: str) -> str:
    """A host that others can reach."""
    if _bind(host) in ("0.0.0.0", "::") or "%" in host:
        raise ValueError(f"{host!r} reaches nobody from elsewhere; legal: the server's name or IP address")
    return host


def _server(server: str) -> str:
    host, _, port = server.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,4}", port, re.ASCII) and int(port) < 2**16:
        bare = host.removeprefix("[").removesuffix("]")
        if address(bare, int(port)) == server:
            _host(bare)
            return server
    raise ValueError(f"{server!r} is no address; legal: host:port, such as fed.example.org:9440 or [::1]:9440")


def _start(info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("home", Path.cwd()))


def _path(value: Any, info: ValidationInfo) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"{value!r} is no path; legal: a path, relative to the folder of this file")
    return Path(os.path.abspath(_start(info) / os.path.expanduser(value)))


def _folder(value: Any, info: ValidationInfo) -> Path:
    path = _path(value, info)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; legal: a folder, which need not exist")
    return path


def _file(value: Any, info: ValidationInfo) -> Path:
    path = _path(value, info)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    return path


def _private(value: Any, info: ValidationInfo) -> Path:
    path = _file(value, info)
    if (mode := path.stat().st_mode) & 0o077:
        raise ValueError(f"{path} is open to others than its owner (mode {mode & 0o777:o}); do: chmod 600 {path}")
    return path


def _own_key(value: Any, info: ValidationInfo) -> Path:
    path = _private(value, info)
    if not path.read_bytes().startswith(OPENSSH):
        raise ValueError(f"{path} is no private key in OpenSSH's form; legal: ECDSA, without passphrase")
    return path


def _public_key(value: Any, info: ValidationInfo) -> Path:
    path = _file(value, info)
    if not path.read_bytes().startswith(ECDSA):
        raise ValueError(f"{path} is no public key of a site; legal: a line of ssh's, {ECDSA.decode()}...")
    return path


def _source(value: Any, info: ValidationInfo) -> Any:
    """Paths among sources as absolute ones; what can only be a data set id stays as it is."""
    if isinstance(value, dict):
        return {name: _source(source, info) for name, source in value.items()}
    if isinstance(value, list):
        return [_source(source, info) for source in value]
    path = _path(value, info)
    named = HUB_ID.fullmatch(value) and value[0] != "." and path.suffix.lower() not in {**FORMS, **WORD_FORMS}
    return value if value.startswith("demo:") or (named and not path.exists()) else str(path)


def _methods(names: list[str] | None) -> list[str] | None:
    from fedstrata.methods import METHODS  # here, as it loads torch

    for name in names or ():
        if name not in METHODS:
            raise ValueError(f"{name!r} is not a method; {did_you_mean(name, METHODS)}")
    return names


Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Host = Annotated[str, AfterValidator(_host)]
Name = Annotated[str, AfterValidator(site_name)]
File = Annotated[Path, BeforeValidator(_file)]
Source = Annotated[
    str | list[str] | dict[Annotated[str, Field(pattern=r"^[\w-]+$")], str | list[str]],
    AfterValidator(_source),
]
"""As in a job (:data:`fedstrata.job.tables.Source`): a file, folder or data set id; several; or by name."""


class Table(BaseModel):
    """A table of a settings file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Settings(Table):
    _home: Path = PrivateAttr(default_factory=Path.cwd)

    def model_post_init(self, context: Any) -> None:
        """Remember where the file stands."""
        if context:
            self._home = context["home"]

    @property
    def home(self) -> Path:
        """The folder of the file."""
        return self._home


class Listen(_Settings):
    """Where a server is reached, and where it listens."""

    host: Host
    """Name or address under which sites reach it; it stands in the certificate."""
    bind: Annotated[str, AfterValidator(_bind)] = Field(
        default_factory=lambda data: _everywhere(data.get("host", ""))
    )
    """Address to listen on: every one of the machine, unless ``host`` is loopback."""
    port: Port = 9440
    """Flower's messages."""
    stream_port: Port = 9441
    """Hidden states, for methods that split the model."""

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.port == self.stream_port:
            raise ValueError(f"stream_port: is {self.stream_port}, as port is; legal: another, from 1 to 65535")
        return self


def _everywhere(host: str) -> str:
    return host if loopback(host) else "::" if ":" in host else "0.0.0.0"


class TLS(Table):
    """``[tls]``: how the server proves who it is."""

    ca: File
    """Certificate of who signed it; every site has a copy."""
    certificate: File
    key: Annotated[Path, BeforeValidator(_private)]


class ServerSettings(Listen):
    """``server.toml``."""

    tls: TLS
    sites: dict[Name, Annotated[Path, BeforeValidator(_public_key)]]
    """Name of each site -> its public key."""

    @model_validator(mode="after")
    def _sites_differ(self) -> Self:
        if not self.sites:
            raise ValueError('[sites]: is empty; legal: a line for each site, such as site-1 = "keys/site-1.pub"')
        owners: dict[bytes, str] = {}
        for name, path in self.sites.items():
            owner = owners.setdefault(b" ".join(path.read_bytes().split()[:2]), name)
            if owner != name:
                raise ValueError(f"[sites] {name}: {path} is the key of {owner} too; legal: one of its own")
        return self


class Data(Table):
    """``[data]``: the site's own rows."""

    train: Source
    test: Source | None = None
    """Absent: the share that the job asks for is kept aside of ``train``."""
    text: str | list[str] = "text"
    label: str = "label"
    columns: list[str] | None = None
    """Names of the columns of files that have no header line."""
    limit: Positive | None = None
    """Read at most so many rows."""
    documents: Literal["lines", "blank", "headings"] = "lines"
    """A row of a plain txt file: a line, lines up to a blank one, or an article under a heading ``= Title =``."""


class Device(Table):
    """``[device]``: what the site computes on."""

    name: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive | None = None
    """Of the processor; as many as it has cores when absent."""


class Allow(Table):
    """``[allow]``: what may leave the site, and for whom."""

    payloads: list[Literal["weights", "hidden_states", "activations"]] = ["weights"]
    """Parts of the model; hidden states of its texts, with their labels; hidden states of every batch."""
    methods: Annotated[list[str] | None, AfterValidator(_methods)] = None
    """Absent: every method."""


class Limits(Table):
    """``[limits]``: where the site says no."""

    bytes_per_round: Positive | None = None
    """Most bytes that may leave in a round."""
    min_examples: Positive = 1
    """Fewest examples of its own that it trains on."""


class SiteSettings(_Settings):
    """``site.toml``."""

    name: Name
    server: Annotated[str, AfterValidator(_server)]
    """Host and port."""
    ca: File
    """Of the server's certificate."""
    key: Annotated[Path, BeforeValidator(_own_key)]
    """The site's private key."""
    folder: Annotated[Path, BeforeValidator(_folder)]
    """The site's own disk: parts it keeps, received parts, logs."""
    data: Data
    device: Device = Device()
    allow: Allow = Allow()
    limits: Limits = Limits()

    @property
    def host(self) -> str:
        """The server's, without port."""
        return self.server.rpartition(":")[0].strip("[]")


def read_server(path: str | Path) -> ServerSettings:
    """The server's settings: of a file, or of the ``server.toml`` in a folder.

    Raises:
        UserError: it cannot be read, or a key or value of it is not legal.
    """
    return _read(Path(path), "server.toml", ServerSettings)


def read_site(path: str | Path) -> SiteSettings:
    """A site's settings: of a file, or of the ``site.toml`` in a folder.

    Raises:
        UserError: it cannot be read, or a key or value of it is not legal.
    """
    return _read(Path(path), "site.toml", SiteSettings)


Kind = TypeVar("Kind", bound=BaseModel)


def _read(path: Path, name: str, kind: type[Kind]) -> Kind:
    path = path / name if path.is_dir() else path
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}); settings are a TOML text") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: is not TOML: {error}") from None
    return checked(kind, data, str(path), Path(os.path.abspath(path)).parent)


def checked(kind: type[Kind], data: Mapping[str, Any], where: str, home: Path | None = None) -> Kind:
    """Settings of what a file holds, or one sentence that begins with ``where``.

    Raises:
        UserError: a key or value is not legal.
    """
    try:
        return kind.model_validate(data, context={"home": home or Path.cwd()})
    except ValidationError as error:
        raise UserError(f"{where}: {_complaint(error, kind)}") from None


def _complaint(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first complaint of pydantic, in the words of :func:`fedstrata.job.file.sentence`, which loads torch."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return str(first["ctx"]["error"])
    words = [str(word) for word in first["loc"][:2]]
    key = f"[{words[0]}] {words[1]}" if len(words) > 1 else words[0]
    if first["type"] == "extra_forbidden":
        table = kind.model_fields[words[0]].annotation if len(words) > 1 else kind
        legal = list(table.model_fields) if isinstance(table, type) and issubclass(table, BaseModel) else []
        return f"{key}: no such key; {did_you_mean(words[-1], legal)}"
    if first["type"] == "missing":
        return f"{key}: is missing"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    if first["type"] in ("model_type", "dict_type"):
        return f"{key}: must be a table ([{key}]), found {first['input']!r}"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        legal = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return f"{key}: {first['input']!r} is not legal; {did_you_mean(first['input'], legal)}"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}, found {first['input']!r}"
