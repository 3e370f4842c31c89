"""A site waits to be connected, and says why it is not: the server is away, or the clocks differ."""

from __future__ import annotations

import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedstrata.reports.times import duration
from fedstrata.sites.flower_processes import BACK, CONNECTED, LOST, prepare_flower, shorten, tail

AHEAD, BEHIND = 5.0, 305.0
"""Seconds by which Flower 1.41 lets a site's clock be ahead of the server's, and behind it."""
ANSWER_SECONDS = 10.0
"""For the server to tell its time."""
REPORT_SECONDS = 60.0
"""After which it is said that the server does not answer."""
LOST_SECONDS = 10.0
"""After which it is said that a server has gone away: a call that is repeated a moment later is no news."""


def await_connection(
    name: str,
    log: Path,
    stop: threading.Event,
    say: Callable[[str], None],
    complaint: Callable[[], str],
    said: list[str],
    process: subprocess.Popen[bytes],
) -> None:
    """Wait until a site's SuperNode is connected or has ended, and say why it is not.

    Args:
        name: the site's.
        log: the SuperNode's.
        stop: set when the program ends.
        say: prints a line.
        complaint: why the server may have refused it; empty if that is not known.
        said: what it has complained of since it was last connected, which is not said at every try.
        process: the SuperNode.
    """
    start = time.monotonic()
    while process.poll() is None and not stop.wait(0.2):
        shorten(log)
        if CONNECTED in tail(log):
            say(f"{name}: connected")
            said.clear()
            return
        if time.monotonic() - start > REPORT_SECONDS:
            say(f"{name}: the server does not answer; {log}")
            start = time.monotonic()
    if process.poll() is not None and not said and (why := complaint()):
        said.append(why)
        say(f"{name}: {why}")


class Watch:
    """Says when the server of a connected site goes away, and when it is back; called again and again.

    Args:
        name: the site's.
        log: the SuperNode's, which tells of calls that are repeated.
        say: prints a line.
        look: what else is looked at while the site is connected.
    """

    def __init__(
        self, name: str, log: Path, say: Callable[[str], None], look: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.log, self.say, self.look = name, log, say, look
        self.since: float | None = None
        self.told = False

    def __call__(self) -> None:
        """Look at the log; say what has changed."""
        self.look()
        end = tail(self.log)
        if end.rfind(LOST) <= end.rfind(BACK):
            if self.told:
                self.say(f"{self.name}: the server answers again")
            self.since, self.told = None, False
            return
        self.since = time.monotonic() if self.since is None else self.since
        if not self.told and time.monotonic() - self.since >= LOST_SECONDS:
            self.say(f"{self.name}: the server does not answer; {self.log}")
            self.told = True


def clock_complaint(server: str, ca: Path | None) -> str:
    """What is wrong with this machine's clock; empty if nothing is, or the server does not answer.

    Args:
        server: ``host:port`` of the server for Flower, which tells its time with every answer, a refusal too.
        ca: certificate of the CA that signed its own; None for plain text.
    """
    prepare_flower()
    import httpx

    try:
        trusted = ssl.create_default_context(cafile=str(ca)) if ca else True
        answer = httpx.head(f"{'https' if ca else 'http'}://{server}/", verify=trusted, timeout=ANSWER_SECONDS)
        ahead = (datetime.now(UTC) - parsedate_to_datetime(answer.headers["Date"])).total_seconds()
    except (httpx.HTTPError, OSError, KeyError, ValueError, TypeError):
        return ""
    if -BEHIND < ahead < AHEAD:
        return ""
    where = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'}"
    most = f"{AHEAD:.0f} s ahead or {BEHIND:.0f} s behind"
    return f"the clock of this machine is {where} the server's; at most {most} are taken: set one of the two"
