"""Who takes part in a round, and in which order replies are taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fedstrata.plan.messages import NoReply, Reply

MOST_TOLD, MOST_REASON = 8, 300
"""Clients without a reply that an error names, and most characters of the reason of each."""


@dataclass(frozen=True)
class RoundSettings:
    """How many take part, and how often the model is scored.

    Attributes:
        fraction: share of the clients sampled per round.
        quorum: share of those sampled who must reply.
        each_round: score after every round, or only after the last.
        own_tests: clients test on rows of their own, so every model is scored there.
        sites: clients are sites, which may be bad: one whose reply cannot be used is left out.
    """

    fraction: float = 1.0
    quorum: float = 1.0
    each_round: bool = True
    own_tests: bool = False
    sites: bool = False


def why_missing(missing: Sequence[NoReply]) -> str:
    """Who did not reply, and why: the first few of them, each in so many characters at most."""
    told = [f"{one.client} {_short(one.reason)}" for one in missing[:MOST_TOLD]]
    left = len(missing) - len(told)
    return "; ".join([*told, *([f"and {left} more"] if left else [])])


def _short(reason: str) -> str:
    return reason if len(reason) <= MOST_REASON else f"{reason[: MOST_REASON - 3]}..."


def in_order(replies: Iterable[Reply | NoReply], clients: Sequence[str]) -> Iterator[Reply | NoReply]:
    """Replies in the order of ``clients``: they are buffered until all earlier clients' have been yielded.

    So the order of arrival cannot change a bit of a sum.
    """
    waiting: dict[str, Reply | NoReply] = {}
    left = iter(clients)
    due = next(left, None)
    for reply in replies:
        waiting[reply.client] = reply
        while due is not None and due in waiting:
            yield waiting.pop(due)
            due = next(left, None)
