"""Who takes part in a round, and where a client's round stands in the run's learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def round_half_up(value: float) -> int:
    """To the nearest integer, halves upwards (Python's ``round`` takes 0.5 and 2.5 down)."""
    return int(value + 0.5)
