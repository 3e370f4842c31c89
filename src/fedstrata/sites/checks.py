"""Checks of the values in a federation's settings: hosts, site names, paths, keys.

A check returns the value as it is used, or raises ValueError with a sentence. Paths are relative to the ``home``
of the validation's context, the folder of the settings file.
"""

from __future__ import annotations

import os
import re
from datetime import date
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from fedstrata.data.forms import known
from fedstrata.data.forms.data_sets import HUB_ID
from fedstrata.errors import did_you_mean
from fedstrata.methods import METHODS

OPENSSH = b"-----BEGIN OPENSSH PRIVATE KEY-----"
ECDSA = b"ecdsa-sha2-nistp"


def loopback(host: str) -> bool:
    """Whether a host is this machine and no other machine can reach it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def join_address(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def site_name(name: str) -> str:
    """A site's name."""
    if not re.fullmatch(r"(?!\.)[\w.-]{1,100}", name):
        raise ValueError(
            f"{name!r} is no name of a site; expected at most 100 letters, digits, -, _ and ., not . first"
        )
    return name


def bind_host(host: str) -> str:
    """A host to listen on. A name whose last label is a number would be a mistyped address."""
    labels = host.split(".")
    try:
        ip_address(host)
    except ValueError:
        label = re.compile(r"(?!-)[\w-]{1,63}(?<!-)", re.ASCII)
        if not all(map(label.fullmatch, labels)) or len(host) > 253 or labels[-1].isdigit():
            raise ValueError(f"{host!r} is no host; expected a name or an IP address, without port") from None
    return host


def public_host(host: str) -> str:
    """A host that other machines can connect to."""
    if bind_host(host) in ("0.0.0.0", "::") or "%" in host:
        raise ValueError(f"{host!r} cannot be reached from elsewhere; expected the server's name or IP address")
    return host


def server_address(server: str) -> str:
    """``host:port`` of a server."""
    host, _, port = server.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,4}", port, re.ASCII) and int(port) < 2**16:
        bare = host.removeprefix("[").removesuffix("]")
        if join_address(bare, int(port)) == server:
            public_host(bare)
            return server
    raise ValueError(f"{server!r} is no address; expected host:port, such as fed.example.org:9440 or [::1]:9440")


def any_path(value: Any, info: ValidationInfo) -> Path:
    """A path, made absolute."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"{value!r} is no path; expected a path, relative to the folder of this file")
    if "\0" in str(value):
        raise ValueError(f"{value!r} is no path: it has a zero byte; expected a path")
    home = (info.context or {}).get("home", Path.cwd())
    path = Path(os.path.abspath(home / os.path.expanduser(value)))
    try:
        path.exists()
    except OSError as error:
        raise ValueError(f"{str(value)[:80]!r} is no path here ({error.strerror}); expected a path") from None
    return path


def folder_path(value: Any, info: ValidationInfo) -> Path:
    """The path of a folder, which need not exist."""
    path = any_path(value, info)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; expected a folder, which need not exist")
    return path


def model_folder(value: Any, info: ValidationInfo) -> Path:
    """The path of a folder with a model."""
    path = any_path(value, info)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; expected the folder of a model")
    return path


def readable_file(value: Any, info: ValidationInfo) -> Path:
    """The path of a file that can be read."""
    path = any_path(value, info)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    return path


def private_file(value: Any, info: ValidationInfo) -> Path:
    """The path of a file that its owner alone can read."""
    path = readable_file(value, info)
    if (mode := path.stat().st_mode) & 0o077:
        raise ValueError(f"{path} is open to others than its owner (mode {mode & 0o777:o}); do: chmod 600 {path}")
    return path


def private_key(value: Any, info: ValidationInfo) -> Path:
    """The path of a site's private key."""
    path = private_file(value, info)
    if not path.read_bytes().startswith(OPENSSH):
        raise ValueError(f"{path} is no private key in OpenSSH's form; expected ECDSA, without passphrase")
    return path


def public_key(value: Any, info: ValidationInfo) -> Path:
    """The path of a site's public key."""
    path = readable_file(value, info)
    if not path.read_bytes().startswith(ECDSA):
        raise ValueError(f"{path} is no public key of a site; expected a line of ssh's, {ECDSA.decode()}...")
    return path


def source(value: Any, info: ValidationInfo) -> Any:
    """A data source with absolute paths; what can only be a data set id stays as it is."""
    if isinstance(value, (dict, list)) and not value:
        raise ValueError(
            f"{value!r} names no rows; expected a file, a folder or a data set id, or several of them"
        )
    if isinstance(value, dict):
        return {name: source(part, info) for name, part in value.items()}
    if isinstance(value, list):
        return [source(part, info) for part in value]
    path = any_path(value, info)
    hub_id = HUB_ID.fullmatch(value) and value[0] != "." and not known(path)
    return value if value.startswith("demo:") or (hub_id and not path.exists()) else str(path)


def split_ends(settings: Any) -> tuple[dict[str, date], Any]:
    """The last days of keys in the content of a ``server.toml``, and the content with paths in place of tables."""
    if not isinstance(settings, dict) or not isinstance(sites := settings.get("sites"), dict):
        return {}, settings
    ends, plain = {}, {}
    for name, entry in sites.items():
        plain[name] = entry
        if not isinstance(entry, dict):
            continue
        if "key" not in entry or (strange := entry.keys() - {"key", "until"}):
            what = "lacks key" if "key" not in entry else f"has {min(strange)!r}"
            raise ValueError(f"[sites] {name}: {what}; expected {{key = PATH, until = YEAR-MONTH-DAY}}")
        plain[name], end = entry["key"], entry.get("until")
        if end is not None and type(end) is not date:
            raise ValueError(f"[sites] {name}: until: {end!r} is no day; expected one such as 2027-12-31")
        if end is not None:
            ends[str(name)] = end
    return ends, {**settings, "sites": plain}


def job_digest(digest: str) -> str:
    """The digest of a job."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"{digest[:80]!r} is no digest of a job; expected sha256: and 64 hexadecimal digits")
    return digest


def method_names(names: list[str] | None) -> list[str] | None:
    """Names of methods; None for every method."""
    for name in names or ():
        if name not in METHODS:
            raise ValueError(f"{name!r} is not a method; {did_you_mean(name, METHODS)}")
    return names
