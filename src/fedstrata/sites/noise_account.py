"""What a site demands of a run's noise, and what it has spent over all runs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.client.private import Private, private_of, spending
from fedstrata.errors import UserError
from fedstrata.job.privacy_rules import check_privacy
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.tables import Job
from fedstrata.privacy.accounting import Spending, epsilon_of
from fedstrata.sites.noise import add_line
from fedstrata.sites.noise_tables import Require
from fedstrata.sites.release_log import LOG
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import read_lines

ACCOUNT = "noise.jsonl"
"""In a site's folder: a line for every round whose message has left with noise; it is never cleared."""


def refusal_of_level(require: Require, limit: float | None, job: Job) -> str | None:
    """Why a site takes no part in a job; None where it does.

    Args:
        require: what it demands.
        limit: epsilon of its ``[limits]``.
        job: the job.
    """
    table = job.privacy
    if require.sum_only and not table.sum_only:
        return "it takes part only where the server sees nothing but sums ([privacy] sum_only = true)"
    wanted = require.level
    if wanted is not None and table.level != wanted:
        return f"it takes part only with [privacy] level = {wanted!r}, the job's is {table.level!r}"
    if (table.honest or 1) > require.honest:
        return (
            f"the job relies on the noise of {table.honest} clients in every sum ([privacy] honest), the site on "
            f"that of {require.honest} ([require] honest of its site.toml)"
        )
    if require.epsilon is not None and table.level == "none":
        return f"it takes part only in runs with noise, of epsilon {require.epsilon:g} at most"
    if limit is not None and table.level == "none":
        return "it takes part only in runs with noise, since it accounts for what all runs together tell of it"
    try:
        check_privacy(job)
    except UserError as error:
        return f"the job's noise promises nothing: {error}"
    return None


def refusal_of_epsilon(require: Require, private: Private | None, examples: int, rounds: int) -> str | None:
    """Why a run would spend more than a site takes; None where it would not."""
    if require.epsilon is None or private is None:
        return None
    epsilon = _epsilon_of_run(require, private, examples, rounds)
    if epsilon <= require.epsilon:
        return None
    return (
        f"the run's noise promises it epsilon {epsilon:.3g} (delta {require.delta:g}), it takes part up to "
        f"{require.epsilon:g}"
    )


def _epsilon_of_run(require: Require, private: Private, examples: int, rounds: int) -> float:
    """What a run spends on a site that is asked in every round."""
    whole = spending(private.table, private.train, examples, rounds)
    return epsilon_of([whole], require.delta, private.table.counted_by)


def protection_of(require: Require, job: Job, examples: int) -> str:
    """What a run hides of a site with so many examples, for its owner; by the site's own count."""
    table, private = job.privacy, private_of(job)
    sees = "sums of the sites' changes alone" if table.sum_only else "each message of this site by itself"
    if private is None:
        return f"the server sees {sees}, without noise"
    epsilon = _epsilon_of_run(require, private, examples, job.method.rounds)
    share = f", if that of {table.honest} sites is in every sum" if (table.honest or 1) > 1 else ""
    return (
        f"the server sees {sees}, with noise at level {table.level!r}: epsilon {epsilon:.3g} of this site at most "
        f"(delta {require.delta:g}){share}"
    )


@dataclass
class NoiseAccount:
    """What a site has spent, on its disk before the message leaves.

    Attributes:
        folder: the site's.
        limit: the most that it spends; None for no limit.
        delta: of the limit.
    """

    folder: Path
    limit: float | None
    delta: float

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The file with a line for every round."""
        return self.folder / ACCOUNT

    def epsilon(self, more: Sequence[Mapping[str, Any]] = ()) -> float:
        """Spent so far, and with further releases.

        After runs at both levels all is counted for one example: where it is added, a change of level ``client``
        is replaced by another, which counts as if the noise were half. All is counted by Rényi's bound if anything
        has to be; lines of earlier versions name no accountant.

        Args:
            more: lines of the account.
        """
        lines = [*account_lines(self.path), *more]
        halves = {"client": 2.0} if len({line["level"] for line in lines}) > 1 else {}
        spent = [
            Spending(line["noise"] / halves.get(line["level"], 1.0), line["rate"], line["count"]) for line in lines
        ]
        return epsilon_of(spent, self.delta, "rdp" if any(line.get("by") == "rdp" for line in lines) else "pld")

    def spend(self, run: str, round: int, table: Privacy, release: Spending, secret: str = "") -> None:
        """Write a round down, once however often it is asked for; with another noise than before once more.

        Args:
            run: names the run.
            round: 0-based.
            table: the job's ``[privacy]``.
            release: the round's.
            secret: names what the noise is drawn from: of a run that was forgotten and begins anew it is another.

        Raises:
            WireError: it would be more than the limit.
        """
        line = _line(run, round, table, release) | {"secret": secret}
        with self._lock:
            if line in account_lines(self.path):
                return
            self._check(line)
            add_line(self.path, line)

    def _check(self, line: Mapping[str, Any]) -> None:
        """Raises WireError: with this line more would be spent than the limit."""
        if self.limit is not None and (epsilon := self.epsilon([line])) > self.limit:
            raise WireError(
                f"round {line['round'] + 1}: over all runs it would have spent epsilon {epsilon:.3g}, its limit "
                f"is {self.limit:g}"
            )

    def foreseen(self, run: str, rounds: int, table: Privacy, release: Spending) -> str:
        """What a run that has not begun would have spent after all its rounds, in a line.

        Args:
            run: names the run.
            rounds: of the run.
            table: the job's ``[privacy]``.
            release: what each of them spends.

        Raises:
            WireError: its first round would be more than the limit.
        """
        lines = [_line(run, round, table, release) for round in range(rounds)]
        self._check(lines[0])
        before, after = self.epsilon(), self.epsilon(lines)
        told = f"noise: over all runs it has spent epsilon {before:.3g}, with this one {after:.3g}"
        if self.limit is None:
            return told
        limit = f"{told}; its limit is {self.limit:g}"
        return limit if after <= self.limit else f"{limit}, so it takes part in the first rounds alone"


def _line(run: str, round: int, table: Privacy, release: Spending) -> dict[str, Any]:
    """A line of the account."""
    line = {"run": run, "round": round, "level": table.level, "by": table.counted_by}
    return line | {"noise": release.noise, "rate": release.rate, "count": release.count}


def account_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of an account.

    Raises:
        UserError: one is damaged.
    """
    try:
        lines = read_lines(path)
        if all(_is_line(line) for line in lines):
            return lines
    except (ValueError, RecursionError):
        pass
    raise _unknown(path, "a line is not as it was written")


def _is_line(line: Any) -> bool:
    """Whether this is what :func:`_line` makes; lines of earlier versions name no accountant."""
    try:
        spent = line["noise"] > 0 and 0 < line["rate"] <= 1 and line["count"] > 0 and line["round"] >= 0
        return bool(spent and isinstance(line["run"], str) and line["level"] in ("example", "client"))
    except (TypeError, KeyError):
        return False


def check_account(folder: Path, noisy: Collection[tuple[str, int]]) -> None:
    """Refuse an account that is damaged or from which lines are missing: what was spent would be told too small.

    Args:
        folder: the site's.
        noisy: (run, round) of every message that has left with noise, by the release log.

    Raises:
        UserError: the account is such a one.
    """
    booked = {(line["run"], line["round"]) for line in account_lines(folder / ACCOUNT)}
    if missing := sorted(set(noisy) - booked):
        run, round = missing[0]
        what = f"lacks round {round + 1} of run {run}, a message of which has left with noise by {LOG}"
        raise _unknown(folder / ACCOUNT, what)


def _unknown(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: {what}; what all runs have spent cannot be told, and nothing leaves this site until the file is "
        "put back"
    )
