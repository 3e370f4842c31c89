"""What a run reports while it goes: plain data for a progress display or a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Baseline:
    """The score of a prediction that is always the same.

    Attributes:
        what: what is predicted; empty where there is no such score.
        headline: the job's headline metric.
        score: metric -> its value.
    """

    what: str = ""
    headline: str = ""
    score: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StageStarted:
    """A stage begins, or goes on after ``done`` rounds.

    Attributes:
        stage: its name; empty for a job of one stage.
        method: the method's name.
        rounds: rounds in all.
        done: rounds done by an earlier call.
        clients: examples of each client.
        notes: what the user should know, a sentence each.
        data: what is known of the rows, a sentence each.
        baseline: what every score has to beat.
        engine: what plays the clients, and why, in a few words; empty between sites.
        epsilon: the largest that noise promises a client over all rounds; None without noise.
    """

    stage: str
    method: str
    rounds: int
    done: int
    clients: dict[str, int]
    notes: tuple[str, ...]
    data: tuple[str, ...] = ()
    baseline: Baseline = field(default_factory=Baseline)
    engine: str = ""
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.baseline, dict):  # as it comes from another process
            object.__setattr__(self, "baseline", Baseline(**self.baseline))


@dataclass(frozen=True)
class Stepped:
    """A client finished training step ``step`` of ``steps`` of its round."""

    round: int
    client: str
    step: int
    steps: int
    loss: float
    examples: int


@dataclass(frozen=True)
class Encoded:
    """Of ``total`` texts, ``done`` have been encoded by a frozen encoder, before the next step or score."""

    done: int
    total: int


@dataclass(frozen=True)
class Counted:
    """Of ``total``, ``done`` are ready: checked plans, forecast rounds, or clients whose noise is calibrated."""

    what: Literal["plans", "rounds", "clients"]
    done: int
    total: int


@dataclass(frozen=True)
class Replied:
    """A client replied. ``bytes`` is the stage's payload up to then, all clients, both ways, without setup."""

    round: int
    client: str
    loss: float | None
    examples: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Missed:
    """A client did not reply; ``reason`` is a sentence without its subject. Round -1 is before the first."""

    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Waiting:
    """The run waits for clients to connect, for ``seconds`` at most."""

    clients: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Awaited:
    """These sites have been asked and have ``seconds`` left to answer; told when they change, and every minute."""

    round: int
    clients: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Scored:
    """A model was scored: the server's, or the mean over the clients' own. Round -1 is the start model."""

    round: int
    score: dict[str, float]


@dataclass(frozen=True)
class RoundEnded:
    """A round is over and on the disk. ``left`` is the seconds that the stage's other rounds will take.

    It is an estimate: each as long as the rounds of this call so far on average.
    """

    round: int
    left: float


@dataclass(frozen=True)
class Noted:
    """What the user should know, a sentence."""

    sentence: str


@dataclass(frozen=True)
class StageEnded:
    """A stage is over; ``reused`` if an earlier call had finished it."""

    stage: str
    reused: bool


@dataclass(frozen=True)
class CellStarted:
    """A cell of a sweep begins; it is number ``number`` (from 0) of ``count``, of which ``over`` have ended."""

    cell: str
    number: int
    count: int
    over: int = 0


@dataclass(frozen=True)
class CellEvent:
    """An event of the run of a cell."""

    cell: str
    event: Event


@dataclass(frozen=True)
class CellEnded:
    """A cell is over: ``finished``, or ``failed`` with the reason as ``message``."""

    cell: str
    status: str
    message: str | None
    seconds: float


Event = (
    StageStarted
    | Stepped
    | Encoded
    | Counted
    | Replied
    | Missed
    | Waiting
    | Awaited
    | Scored
    | RoundEnded
    | Noted
    | StageEnded
    | CellStarted
    | CellEvent
    | CellEnded
)


@dataclass(frozen=True)
class Asked:
    """A site is asked something in a round of a run, which has ``rounds`` of them."""

    run: str
    method: str
    phase: str
    round: int
    rounds: int


@dataclass(frozen=True)
class Worked:
    """A site finished step ``step`` of ``steps`` of what it was asked, with ``examples`` so far."""

    step: int
    steps: int
    loss: float
    examples: int


@dataclass(frozen=True)
class Answered:
    """A site is done with what it was asked; without its answer where ``failed``."""

    failed: bool


@dataclass(frozen=True)
class Declined:
    """A site has not done what it was asked, in the words that it told the server; ``run`` is empty for none."""

    run: str
    reason: str


@dataclass(frozen=True)
class RunEnded:
    """A site was told that a run is over."""

    run: str


SiteEvent = Asked | Worked | Answered | Declined | RunEnded
"""What a site reports of its own work."""
