"""Who is admitted to a federation now: whose key stands in ``server.toml`` and has not ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.sites.settings import ServerSettings, read_server

LOOK_SECONDS = 2.0
"""Between two looks at ``server.toml``."""
REVOKED = "is not admitted any more: its key was removed, replaced or has ended (server.toml)"


def keys_now(settings: ServerSettings) -> dict[str, Path]:
    """Site -> its public key, of those whose key has not ended; ``until`` is a key's last day, in UTC."""
    today = datetime.now(UTC).date()
    return {name: path for name, path in settings.sites.items() if settings.ends.get(name, today) >= today}


class Admission:
    """Looks at ``server.toml`` from time to time; with an error in a file the last answer stands.

    Args:
        settings: as they were read.
        file: to look at; None where the settings are of no file, so that only the end of a key counts.
        say: told of an error in the file, once.
    """

    def __init__(
        self, settings: ServerSettings, file: Path | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.settings, self.file, self.say = settings, file, say
        self.first = {name: path.read_bytes() for name, path in settings.sites.items()}
        self.found = dict(self.first)
        self.looked, self.complaint = 0.0, ""

    def keys(self) -> dict[str, bytes]:
        """Site -> content of its public key."""
        if self.file and time.monotonic() > self.looked + LOOK_SECONDS:
            self.looked = time.monotonic()
            try:
                self.settings, self.complaint = read_server(self.file), ""
            except UserError as error:
                if str(error) != self.complaint:
                    self.complaint = str(error)
                    self.say(f"{error}; the sites stay as they were")
        with suppress(OSError):  # as with too many files open, or a disk that does not answer
            self.found = {name: path.read_bytes() for name, path in keys_now(self.settings).items()}
        return {name: key for name, key in self.found.items() if name in keys_now(self.settings)}

    def revoked(self) -> set[str]:
        """The sites whose key at the beginning is not theirs any more."""
        keys = self.keys()
        return {name for name, key in self.first.items() if keys.get(name) != key}


def watch(
    admission: Admission,
    apply: Callable[[dict[str, Path]], None],
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Apply every change of the admitted keys until ``stop`` is set; what fails is tried again."""
    known = admission.keys()
    while not stop.wait(LOOK_SECONDS):
        try:
            found = admission.keys()
            if found == known:
                continue
            apply(keys_now(admission.settings))
        except Exception as error:
            say(f"the sites could not be changed, trying again ({type(error).__name__})")
            continue
        for line in _changes(known, found):
            say(line)
        known = found


def _changes(known: dict[str, bytes], found: dict[str, bytes]) -> Iterable[str]:
    for name in known.keys() | found.keys():
        if name not in found:
            yield f"{name}: is not admitted any more"
        elif known.get(name) != found[name]:
            yield f"{name}: is admitted with {'another' if name in known else 'its'} key"
