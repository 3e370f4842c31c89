"""What the server asks of a client and what the client replies, as data; and what carries the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fedstrata.plan.arrivals import Arrival
from fedstrata.plan.kinds import Phase, Tensors, Weights
from fedstrata.plan.plan import Plan


@dataclass(frozen=True)
class Positions:
    """What went through the model, padding included; additive over batches.

    Attributes:
        tokens: positions through the layers, B * S.
        pairs: positions attended to, B * S * S.
        predicted: positions through pooler and head: masked ones, all, or one per example.
    """

    tokens: int = 0
    pairs: int = 0
    predicted: int = 0

    def __add__(self, other: Positions) -> Positions:
        return Positions(self.tokens + other.tokens, self.pairs + other.pairs, self.predicted + other.predicted)


Tagged = Mapping[str, tuple[object, Tensors]]
"""Part -> (tag, its tensors): equal tags of a part mean equal tensors."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one client.

    Attributes:
        round: 0-based round.
        client: the client's name.
        plan: what to build, train, send and keep.
        phase: what is asked, see :data:`fedstrata.plan.kinds.Phase`.
        first: the client has not trained before, so what it computes once is counted now.
        span: the shares of the run's training that are done before and after the client's round.
        versions: the version of every shared part that the plan needs.
        parts: those of them that the client lacks, as they travel.
        sums: the question of a step of a masked sum.
    """

    round: int
    client: str
    plan: Plan
    phase: Phase
    versions: dict[str, int]
    parts: Weights
    first: bool = False
    span: tuple[float, float] = (0.0, 1.0)
    sums: dict[str, bytes] = field(default_factory=dict)

    @property
    def passes_layers(self) -> bool:
        """Whether the client's batches pass through layers of the server."""
        return bool(self.plan.server) and self.phase != "receive"


@dataclass(frozen=True)
class Reply:
    """What a client answers.

    Attributes:
        client: its name.
        examples: number of its training examples: its weight in the mean.
        weights: the parts sent, as they travel; in phase ``hidden_states`` those, under that name.
        loss: mean over the steps of the round, without the proximal term; None where it is not told.
        steps: optimizer steps made.
        work: positions computed with.
        flops: of the training steps, by :func:`fedstrata.cost.flops.train_flops`.
        seconds: clock time of the client's work.
        scores: in phase ``evaluate``, the client's model on its test rows; by client where it is scored on several
            clients' own.
        sums: the answer to a step of a masked sum.
    """

    client: str
    examples: int
    weights: Weights = field(default_factory=dict)
    loss: float | None = float("nan")
    steps: int = 0
    work: Positions = field(default_factory=Positions)
    flops: int = 0
    seconds: float = 0.0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    sums: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class NoReply:
    """A client that does not answer a request, and why: a sentence without its subject, such as ``refuses: …``."""

    client: str
    reason: str


class Engine(Protocol):
    """Knows the clients and brings them requests."""

    def clients(self) -> Sequence[str]:
        """Their names, stable and in canonical order."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
        """One answer per request, in order of arrival; that there is none is one too."""


@runtime_checkable
class BufferedEngine(Engine, Protocol):
    """One whose clients may answer in a later round than that in which they were asked."""

    def arrive(self, round: int, requests: Sequence[Request], count: int) -> Sequence[Arrival]:
        """Ask, and wait until so many answers have arrived, to these requests or to earlier ones.

        Returns:
            They in the order of arrival, and with them who will not answer; fewer where nobody is left.
        """

    def answers(self) -> Iterator[Reply | NoReply]:
        """What has arrived, in canonical order of the clients."""

    def give_up(self, client: str) -> None:
        """Wait no more for a client's answer."""

    def ask_again(self, requests: Iterable[Request]) -> None:
        """Bring requests of a run that goes on to whoever has not got them, or has lost them."""
