"""The settings of a federation: ``server.toml`` for the server, ``site.toml`` for each site, checked when read.

A relative path in them starts at the folder of its file; as read, every path is absolute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from fedstrata.errors import UserError
from fedstrata.job import data_tables as job
from fedstrata.job.base import Positive
from fedstrata.job.sentences import sentence
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import Payload
from fedstrata.sites import checks
from fedstrata.sites.checks import loopback
from fedstrata.sites.limit_tables import Approve, Limits, Name, ServerLimits, Table
from fedstrata.sites.noise_tables import Require

FORMAT = 2
"""The number that ``format`` must have in ``server.toml`` and ``site.toml``."""
FORMAT_CHANGES = (
    "since format 2 the key [allow] exchanges of a site is called payloads and its value 'features' is called "
    "'hidden_states'; rename them where the file has them, and write format = 2 as its first line"
)

Port = Annotated[int, Field(ge=1, le=65535)]
Host = Annotated[str, AfterValidator(checks.public_host)]
File = Annotated[Path, BeforeValidator(checks.readable_file)]
PrivateFile = Annotated[Path, BeforeValidator(checks.private_file)]
PublicKey = Annotated[Path, BeforeValidator(checks.public_key)]
Source = Annotated[job.Source, AfterValidator(checks.source)]


class _Settings(Table):
    _home: Path = PrivateAttr(default_factory=Path.cwd)

    def model_post_init(self, context: Any) -> None:
        """Remember the folder of the file."""
        if context:
            self._home = context["home"]

    @property
    def home(self) -> Path:
        """The folder of the file."""
        return self._home


class Listen(_Settings):
    """Where a server is reached, and where it listens."""

    host: Host
    """Name or address under which sites reach the server; the certificate names it."""
    bind: Annotated[str, AfterValidator(checks.bind_host)] = Field(
        default_factory=lambda data: _default_bind(data.get("host", ""))
    )
    """Address to listen on: all of the machine's, unless ``host`` is loopback."""
    port: Port = 9440
    """Port for Flower, which tells who is there and calls the sites."""
    stream_port: Port = 9441
    """Port for activations, for methods that split the model."""
    message_port: Port = 9442
    """Port for messages: what sites are asked and what they reply, with the parts of the model."""

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports: dict[int, str] = {}
        for name in ("port", "stream_port", "message_port"):
            other = ports.setdefault(number := getattr(self, name), name)
            if other != name:
                raise ValueError(f"{name}: is {number}, as {other} is; expected another, from 1 to 65535")
        return self


def _default_bind(host: str) -> str:
    return host if loopback(host) else "::" if ":" in host else "0.0.0.0"


class TLS(Table):
    """``[tls]``: how the server proves its identity."""

    ca: File
    """Certificate of the CA that signed the server's; every site has a copy."""
    certificate: File
    key: PrivateFile
    clients: File | None = None
    """Certificate of the CA of the sites' own certificates; absent: their keys and tokens are enough."""


class ServerSettings(Listen):
    """``server.toml``."""

    tls: TLS
    page_port: Port = 9443
    """Port of the live page, on this machine alone."""
    sites: dict[Name, PublicKey]
    """Name of each site -> its public key; in the file also a table {key, until}."""
    limits: ServerLimits = ServerLimits()
    _ends: dict[str, date] = PrivateAttr(default_factory=dict)

    @property
    def ends(self) -> dict[str, date]:
        """Site -> the last day of its key, in UTC; of those whose keys end."""
        return self._ends

    @property
    def most_weight(self) -> dict[str, int]:
        """Site -> most examples for which it counts; who is not in it counts for all of its own."""
        most = self.limits.max_weight or {}
        return dict(most) if isinstance(most, dict) else dict.fromkeys(self.sites, most)

    @model_validator(mode="wrap")
    @classmethod
    def _keys_end(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        ends, data = checks.split_ends(data)
        settings = handler(data)
        settings._ends.update(ends)
        return settings

    @model_validator(mode="after")
    def _sites_differ(self) -> Self:
        if not self.sites:
            raise ValueError(
                '[sites]: is empty; expected a line for each site, such as site-1 = "keys/site-1.pub"'
            )
        owners: dict[bytes, str] = {}
        for name, path in self.sites.items():
            owner = owners.setdefault(b" ".join(path.read_bytes().split()[:2]), name)
            if owner != name:
                raise ValueError(f"[sites] {name}: {path} is the key of {owner} too; expected one of its own")
        if strange := self.most_weight.keys() - self.sites.keys():
            raise ValueError(f"[limits] max_weight: {min(strange)!r} is none of [sites]")
        return self


class Data(Table):
    """``[data]``: the site's own rows."""

    train: Source
    test: Source | None = None
    """Absent: the share of ``train`` that the job asks for is held out."""
    text: str | list[str] = "text"
    label: str = "label"
    columns: list[str] | None = None
    """Column names of files that have no header line."""
    delimiter: job.Delimiter | None = None
    """Between the fields of csv files, and of tsv and txt files where it is no tab; absent: found out."""
    encoding: job.Encoding | None = None
    """Of text files; absent: UTF-8, or what they are found to have."""
    limit: Positive | None = None
    """Read at most so many rows."""
    documents: Literal["lines", "blank", "headings"] = "lines"
    """A row of a plain txt file: a line, lines up to a blank one, or an article under a heading ``= Title =``."""


class Device(Table):
    """``[device]``: what the site computes on."""

    name: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive | None = None
    """CPU threads; absent: as many as there are cores."""


def _weights() -> list[Payload]:
    return ["weights"]


class Allow(Table):
    """``[allow]``: what may leave the site, and for which methods."""

    payloads: list[Payload] = Field(default_factory=_weights)
    methods: Annotated[list[str] | None, AfterValidator(checks.method_names)] = None
    """Absent: every method."""


class Model(Table):
    """``[model]``: what the site has of models."""

    path: Annotated[Path, BeforeValidator(checks.model_folder)] | None = None
    """Folder of a model; a run that starts from it does not send it."""


class SiteSettings(_Settings):
    """``site.toml``."""

    name: Name
    server: Annotated[str, AfterValidator(checks.server_address)]
    """Host and port."""
    ca: File
    """Certificate of the CA that signed the server's."""
    key: Annotated[Path, BeforeValidator(checks.private_key)]
    """The site's private key."""
    certificate: File | None = None
    """The site's own certificate, where the server demands one; and its private key."""
    certificate_key: PrivateFile | None = None
    folder: Annotated[Path, BeforeValidator(checks.folder_path)]
    """The site's own disk: personal parts, received parts, logs."""
    data: Data
    device: Device = Device()
    allow: Allow = Allow()
    limits: Limits = Limits()
    model: Model = Model()
    peers: Annotated[Path, BeforeValidator(checks.folder_path)] | None = None
    """Folder with the public key of every site of the federation, ``NAME.pub``; they sign masked sums."""
    require: Require = Require()
    approve: Approve = Approve()

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("certificate: goes with certificate_key; found one of them alone")
        return self

    @property
    def host(self) -> str:
        """The server's host, without port."""
        return self.server.rpartition(":")[0].strip("[]")


def read_server(path: str | Path) -> ServerSettings:
    """The server's settings: of a file, or of the ``server.toml`` in a folder.

    Raises:
        UserError: the file cannot be read, has an older format, or holds an invalid key or value.
    """
    return _read(Path(path), "server.toml", ServerSettings)


def read_site(path: str | Path) -> SiteSettings:
    """A site's settings: of a file, or of the ``site.toml`` in a folder.

    Raises:
        UserError: the file cannot be read, has an older format, or holds an invalid key or value.
    """
    return _read(Path(path), "site.toml", SiteSettings)


Read = TypeVar("Read", bound=BaseModel)


def _read(path: Path, name: str, model: type[Read]) -> Read:
    path = path / name if os.path.isdir(path) else path
    data = read_toml(path)
    found = data.pop("format", None)
    if type(found) is not int or found != FORMAT:
        state = "is missing" if found is None else f"is {found!r}"
        raise UserError(f"{path}: format: {state}; expected {FORMAT}: {FORMAT_CHANGES}")
    return validated(model, data, str(path), Path(os.path.abspath(path)).parent)


def validated(model: type[Read], data: Mapping[str, Any], where: str, home: Path | None = None) -> Read:
    """The settings in the content of a file.

    Args:
        model: what they are checked against.
        data: the content.
        where: what the error's sentence begins with.
        home: the folder of the file; None for the current one.

    Raises:
        UserError: a key or value is invalid.
    """
    try:
        return model.model_validate(data, context={"home": home or Path.cwd()})
    except ValidationError as error:
        raise UserError(f"{where}: {sentence(error, model)}") from None
