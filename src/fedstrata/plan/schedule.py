"""Who takes part in a round, and where a client's round stands in the run's learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstrata.plan.kinds import Phase
from fedstrata.plan.plan import Method
from fedstrata.plan.streams import CLIENTS, SERVER, Streams


@dataclass(frozen=True)
class ScheduleSpan:
    """Position of one client's round in the run's learning-rate schedule.

    Attributes:
        steps: steps of the round.
        epoch: steps of one pass over the client's examples, the first one where they differ.
        begin: share of the run's training that is done before the round.
        end: share of it that is done after the round.
    """

    steps: int
    epoch: int
    begin: float = 0.0
    end: float = 1.0


def sample_clients(clients: Sequence[str], fraction: float, round: int, streams: Streams) -> list[str]:
    """The clients asked in ``round``, in their own order; at least one."""
    count = max(1, round_half_up(fraction * len(clients)))
    chosen = streams.numpy(round, SERVER, CLIENTS).choice(len(clients), count, replace=False)
    return [clients[i] for i in sorted(chosen)]


def round_span(round: int, rounds: int) -> tuple[float, float]:
    """The shares of a run's training that are done before a round and after it."""
    return round / rounds, (round + 1) / rounds


def check_span(phase: Phase, span: tuple[float, float], round: int, method: Method) -> None:
    """Refuse to train at another place in the schedule than a round has.

    Where clients train one after the other, each has a piece of the round, and does not know of how many.

    Raises:
        ValueError: it is another one.
    """
    if phase != "train":
        return
    whole = round_span(round, method.rounds)
    pieces = method.client_schedule == "sequential"
    if span != whole and not (pieces and whole[0] <= span[0] < span[1] <= whole[1]):
        where = "within " if pieces else ""
        raise ValueError(f"span: is {span[0]} to {span[1]}; expected {where}{whole[0]} to {whole[1]}")


def round_half_up(value: float) -> int:
    """To the nearest integer, halves upwards (Python's ``round`` takes 0.5 and 2.5 down)."""
    return int(value + 0.5)
