"""What a site demands of a run's noise, and what it has spent over all runs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.client.poisson import sampling
from fedstrata.client.private import Private, noise_of
from fedstrata.errors import UserError
from fedstrata.job.privacy_rules import check_privacy
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.tables import Job
from fedstrata.privacy.accounting import Spending, epsilon_of
from fedstrata.sites.noise import add_line, whole_lines
from fedstrata.sites.noise_tables import Require
from fedstrata.sites.release_log import LOG
from fedstrata.wire.codec import WireError

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


def release_of(private: Private, examples: int) -> Spending:
    """What one round's message of a site with so many examples spends."""
    rate, steps = 1.0, 1
    if private.table.level == "example":
        rate, steps, _ = sampling(examples, private.train)
    return Spending(noise_of(private.table, private.train, examples), rate, steps)


def refusal_of_epsilon(require: Require, private: Private | None, examples: int, rounds: int) -> str | None:
    """Why a run would spend more than a site takes; None where it would not."""
    if require.epsilon is None or private is None:
        return None
    one = release_of(private, examples)
    whole = Spending(one.noise, one.rate, one.count * rounds)
    epsilon = epsilon_of([whole], require.delta, private.table.counted_by)
    if epsilon <= require.epsilon:
        return None
    return (
        f"the run's noise promises it epsilon {epsilon:.3g} (delta {require.delta:g}), it takes part up to "
        f"{require.epsilon:g}"
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

    def epsilon(self, more: Mapping[str, Any] | None = None) -> float:
        """Spent so far, with one release more; what was spent at different levels is added.

        Of a level all is counted by Rényi's bound if anything of it has to be.

        Args:
            more: a line of the account.
        """
        spent: dict[str, list[Mapping[str, Any]]] = {}
        for line in [*whole_lines(self.path), *([more] if more else [])]:
            spent.setdefault(line["level"], []).append(line)
        share = self.delta / max(1, len(spent))
        return sum(_epsilon(own, share) for own in spent.values())

    def spend(self, run: str, round: int, table: Privacy, release: Spending) -> None:
        """Write a round down, once however often it is asked for; with another noise than before once more.

        Args:
            run: names the run.
            round: 0-based.
            table: the job's ``[privacy]``.
            release: the round's.

        Raises:
            WireError: it would be more than the limit.
        """
        with self._lock:
            if line := self.check(run, round, table, release):
                add_line(self.path, line)

    def check(self, run: str, round: int, table: Privacy, release: Spending) -> dict[str, Any] | None:
        """The line of a round, see :meth:`spend`; None where it is written down already.

        Raises:
            WireError: it would be more than the limit.
        """
        line = {"run": run, "round": round, "level": table.level, "by": table.counted_by}
        line |= {"noise": release.noise, "rate": release.rate, "count": release.count}
        if line in whole_lines(self.path):
            return None
        if self.limit is not None and (epsilon := self.epsilon(line)) > self.limit:
            raise WireError(
                f"round {round + 1}: over all runs it would have spent epsilon {epsilon:.3g}, its limit "
                f"is {self.limit:g}"
            )
        return line


def _epsilon(lines: Sequence[Mapping[str, Any]], delta: float) -> float:
    """Epsilon of lines of an account, all of one level; those of earlier versions name no accountant."""
    spent = [Spending(line["noise"], line["rate"], line["count"]) for line in lines]
    return epsilon_of(spent, delta, "rdp" if any(line.get("by") == "rdp" for line in lines) else "pld")


def check_account(folder: Path, noisy: Collection[tuple[str, int]]) -> None:
    """Refuse an account from which lines are missing: what was spent would be told too small.

    Args:
        folder: the site's.
        noisy: (run, round) of every message that has left with noise, by the release log.

    Raises:
        UserError: a round of them is not in the account.
    """
    booked = {(line["run"], line["round"]) for line in whole_lines(folder / ACCOUNT)} if noisy else set()
    if missing := sorted(set(noisy) - booked):
        run, round = missing[0]
        raise UserError(
            f"{folder / ACCOUNT}: lacks round {round + 1} of run {run}, a message of which has left with noise by "
            f"{LOG}; what all runs have spent cannot be told, and nothing leaves this site until the file is put "
            "back"
        )
