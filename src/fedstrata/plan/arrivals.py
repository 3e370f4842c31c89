"""Asynchronous rounds: in which round whose answer arrives, drawn from the seed or as a run has recorded it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedstrata.errors import UserError, plural
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import ARRIVALS, SERVER, Streams

MOST_STALENESS = 100
"""Rounds after which an answer is not waited for any more."""
SPREAD = 0.5
"""Standard deviation of the logarithm of the factor by which a client's time is drawn to differ."""
Round = Annotated[int, Field(ge=0, le=10**9)]


@dataclass(frozen=True)
class Arrival:
    """An answer, or that there will be none.

    Attributes:
        round: 0-based round that it arrived in.
        client: whose it is.
        asked: round of the request.
        missing: it cannot be used, or will not come.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    round: Round
    client: str
    asked: Round
    missing: bool = False

    def record(self) -> dict[str, Any]:
        """Its line in ``arrivals.jsonl``."""
        return asdict(self)


@dataclass(frozen=True)
class Cohort:
    """Whom asynchronous rounds ask.

    Attributes:
        names: the clients, in canonical order.
        fraction: share of them sampled per round.
        buffer: answers that end a round.
        streams: all randomness.
    """

    names: Sequence[str]
    fraction: float
    buffer: int
    streams: Streams

    def asked(self, round: int, busy: Mapping[str, Any]) -> list[str]:
        """Those of a round's sample that have answered what they were asked before."""
        sampled = sample_clients(self.names, self.fraction, round, self.streams)
        return [name for name in sampled if name not in busy]


def overdue(asked: Mapping[str, int], round: int) -> list[str]:
    """Clients that are not waited for any more when a round begins.

    Args:
        asked: client -> round in which it was asked what it has not answered.
        round: the round.
    """
    return [client for client, before in asked.items() if round - before > MOST_STALENESS]


def drawn_arrivals(cohort: Cohort, examples: Mapping[str, int]) -> Iterator[list[Arrival]]:
    """The order of arrival where no clock decides, round by round without end.

    A client takes as long as its examples, times a factor whose logarithm is normally distributed, drawn anew for
    each request. The next round begins when the last answer of one has arrived.

    Args:
        cohort: whom is asked.
        examples: client -> number of its examples.
    """
    names, streams = cohort.names, cohort.streams
    asked, there = dict[str, int](), dict[str, float]()
    now = 0.0
    for round in count():
        for name in overdue(asked, round):
            del asked[name]
        factors = streams.numpy(round, SERVER, ARRIVALS).lognormal(0.0, SPREAD, len(names))
        times = {name: now + examples[name] * float(factor) for name, factor in zip(names, factors, strict=True)}
        for name in cohort.asked(round, asked):
            asked[name], there[name] = round, times[name]
        first = sorted((name for name in names if name in asked), key=lambda name: there[name])[: cohort.buffer]
        yield [Arrival(round, name, asked.pop(name)) for name in first]
        now = max([now, *(there[name] for name in first)])


def recorded_arrivals(path: Path, cohort: Cohort, rounds: int) -> list[list[Arrival]]:
    """The order of arrival that a run has recorded, round by round.

    Args:
        path: its ``arrivals.jsonl``.
        cohort: whom is asked.
        rounds: number of rounds.

    Raises:
        UserError: the file cannot be read, is damaged, is shorter, or cannot be of this job.
    """
    by_round: dict[int, list[tuple[int, Arrival]]] = {}
    for number, arrival in enumerate(_read(path), 1):
        by_round.setdefault(arrival.round, []).append((number, arrival))
    if rounds and max(by_round, default=-1) < rounds - 1:
        found = max(by_round, default=-1) + 1
        raise UserError(
            f"[engine] arrivals: {path} has the arrivals of {plural(found, 'round')}, the job has {rounds}"
        )
    asked = dict[str, int]()
    for round in range(rounds):
        for name in overdue(asked, round):
            del asked[name]
        asked |= dict.fromkeys(cohort.asked(round, asked), round)
        found_here = by_round.setdefault(round, [])
        for number, arrival in found_here:
            if asked.pop(arrival.client, None) != arrival.asked:
                raise UserError(
                    f"[engine] arrivals: {path}, line {number}: {arrival.client!r} answers in round {round + 1} "
                    f"what it was asked in round {arrival.asked + 1}, but there it was not asked, or has answered"
                )
        answers = sum(not arrival.missing for _, arrival in found_here)
        if answers > cohort.buffer or (answers < cohort.buffer and asked):
            raise UserError(
                f"[engine] arrivals: {path}: round {round + 1} ends with {plural(answers, 'answer')}, not with "
                f"engine.buffer = {cohort.buffer}, so it was recorded in another job"
            )
    return [[arrival for _, arrival in by_round[round]] for round in range(rounds)]


def _read(path: Path) -> Iterator[Arrival]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"[engine] arrivals: {path} cannot be read: {error.strerror or error}") from None
    arrival = TypeAdapter(Arrival)
    for number, line in enumerate(lines, 1):
        try:
            yield arrival.validate_json(line)
        except ValidationError:
            raise UserError(
                f"[engine] arrivals: {path}, line {number}: is not an arrival; expected a line of a run's "
                'arrivals.jsonl, such as {"round": 3, "client": "a", "asked": 1, "missing": false}'
            ) from None
