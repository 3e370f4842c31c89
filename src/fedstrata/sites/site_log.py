"""The site's own log: a line for each message, whatever the other side has put into it."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from fedstrata.wire.foreign import plain_text

LOG = logging.getLogger("fedstrata.site")
LONGEST = 4000
"""Characters of a line."""


class PlainLines(logging.Formatter):
    """Writes every message on one line, without escape sequences of terminals."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        record.message = plain_text(record.message, LONGEST)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """A traceback, its lines indented, so that none can be taken for another message."""
        return "\n".join(f"  {plain_text(line, LONGEST)}" for line in super().formatException(ei).splitlines())


class SiteLog(RotatingFileHandler):
    """The log's file, which on a full disk lacks lines and puts no traceback on the terminal for each."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that the disk has no room for lines: what is refused meanwhile stands nowhere else."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.told:
            self.told = True
            print(f"{self.baseFilename}: {error.strerror}; it lacks lines from here on", file=sys.stderr)


def log_to(path: Path) -> None:
    """Write the site's log to a file, of which a few older ones are kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = SiteLog(path, maxBytes=10_000_000, backupCount=3, encoding="utf-8")
    handler.setFormatter(PlainLines("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
