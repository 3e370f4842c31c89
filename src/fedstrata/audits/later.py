"""A later round of a job, where clients then send what they do not send in the first: of adapters the factor A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedstrata.audits.bench import Bench
from fedstrata.audits.fitting import Fitting, fitting, sent_later
from fedstrata.audits.options import ATTACKS
from fedstrata.audits.play import play
from fedstrata.audits.settings import settings
from fedstrata.audits.short_training import trained_weights


def later_bench(bench: Bench, attacks: Sequence[str]) -> Bench | None:
    """The stage in its first later round in which an attack reads what it does not read in the first.

    It begins with the model as the first round leaves it where the client is alone.

    Args:
        bench: the stage, in its first round.
        attacks: those that are asked for.

    Returns:
        None where there is no such round.
    """
    missing = set(sent_later(bench))
    for round in range(1, bench.job.method.rounds if missing else 0):
        later = replace(bench, round=round)
        if missing & set(later.plan.send) and missing & _read(fitting(later), attacks):
            *_, own = settings(bench)
            played = play(bench, bench.client, bench.ready.train, bench.index, own.train)
            return replace(later, begins=trained_weights(bench, played))
    return None


def _read(fits: Fitting, attacks: Sequence[str]) -> set[str]:
    """The parts that some attacks read."""
    return {part for name, read in fits.items() if name in attacks for part in read}


def both(first: Fitting, later: Fitting) -> Fitting:
    """What the attacks read in either of two rounds."""
    names = [name for name in ATTACKS if name in first or name in later]
    return {name: [*dict.fromkeys([*first.get(name, ()), *later.get(name, ())])] for name in names}
