"""What an exchange is: the two halves of a payload's protocol, their dry forms, and the words for permission."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstrata.client.answer import ClientRuntime, Handlers
from fedstrata.client.private import samples_of
from fedstrata.job.tables import Job, Train
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import SUM_PHASES, Index, Payload, Phase, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams
from fedstrata.privacy.sum_terms import LEAST, Signer, Unsigned
from fedstrata.server.layers import ServerLayers
from fedstrata.server.rounds import Half, Rounds
from fedstrata.server.server import Server
from fedstrata.wire.activations import StreamForm, stream_form
from fedstrata.wire.codec import Codec
from fedstrata.wire.delta import job_codec
from fedstrata.wire.dry import DryWire
from fedstrata.wire.store import Store


@dataclass(frozen=True)
class SumSigning:
    """What the signatures of masked sums are bound to.

    Attributes:
        run: names the run.
        signer: knows the clients' registered keys.
        least: fewest clients whose sum is opened.
        equal_weights: whether all clients weigh the same in the mean, however many examples they have.
    """

    run: bytes = b""
    signer: Signer = field(default_factory=Unsigned)
    least: int = LEAST
    equal_weights: bool = False


Traffic = Iterable[tuple[str, str, int]]
"""(direction, what, bytes) of what passed beside the parts."""


@dataclass(frozen=True)
class ServerContext:
    """What the server's half of an exchange is made of.

    Attributes:
        method: the method.
        server: the server.
        runtime: the server's own model and trainer.
        clients: the clients' names, in their order.
        plan: of the first client in the first round.
        classes: number of classes; None where the labels are numbers.
        max_positions: most tokens of a text.
        store: the server's own disk.
        sums: what masked sums are signed with; None where parts travel as they are.
        buffer: answers that end an asynchronous round; None where all are waited for.
    """

    method: Method
    server: Server
    runtime: ClientRuntime
    clients: tuple[str, ...]
    plan: Plan
    classes: int | None
    max_positions: int
    store: Store
    sums: SumSigning | None = None
    buffer: int | None = None


@dataclass(frozen=True)
class DryContext:
    """What a forecast knows: shapes and lengths, no tensors.

    Attributes:
        method: the method.
        parts: the model's parts.
        streams: all randomness.
        train: the job's ``[train]``.
        wire: how parts travel.
        dtype: how hidden states travel that are sent once.
        stream: how those of batches travel, and their gradients.
        lengths: client -> tokens of each of its examples.
        tests: makes client -> tokens of each example that it is scored on.
        predicted: lengths of a batch and its width -> positions through the head.
        memory: what was computed once and holds for many clients and rounds.
        sums: parts travel in masked sums.
        equal_weights: in these all clients weigh the same.
        task: the task's kind.
        poisson: where every example takes part in every step by a coin of its own, what throws those of a request.
        buffer: answers that end an asynchronous round; None where all are waited for.
        bound: of asynchronous rounds whose order of arrival is not known, the most that they can cost.
    """

    method: Method
    parts: Parts
    streams: Streams
    train: Train
    wire: DryWire
    dtype: str
    stream: StreamForm
    lengths: Mapping[str, Index]
    tests: Callable[[], Mapping[str, Index]]
    predicted: Callable[[Index, int], int]
    memory: dict[Any, Any] = field(default_factory=dict)
    sums: bool = False
    equal_weights: bool = False
    task: str = ""
    poisson: Callable[[Request], np.random.Generator] | None = None
    buffer: int | None = None
    bound: bool = False


def dry_context(
    job: Job,
    parts: Parts,
    codec: Codec | None,
    lengths: Mapping[str, Index],
    tests: Callable[[], Mapping[str, Index]],
    predicted: Callable[[Index, int], int],
) -> DryContext:
    """What a forecast of a job knows.

    Args:
        job: the job.
        parts: the model's, with what of them travels.
        codec: one of the caller's own; None: the job's.
        lengths: see :class:`DryContext`.
        tests: see :class:`DryContext`.
        predicted: see :class:`DryContext`.
    """
    return DryContext(
        method=job.method,
        parts=parts,
        streams=Streams(job.train.seed),
        train=job.train,
        wire=DryWire(codec or job_codec(job.wire.dtype, job.wire.forms), parts.sharing),
        dtype=job.wire.dtype,
        stream=stream_form(*job.wire.stream),
        lengths=lengths,
        tests=tests,
        predicted=predicted,
        sums=job.privacy.sum_only,
        equal_weights=job.privacy.level == "client",
        task=job.task.kind,
        poisson=samples_of(job),
        buffer=None if job.between_sites else job.engine.buffer,
        bound=job.between_sites and job.engine.buffer is not None,
    )


DryHandler = Callable[[DryContext, Request], Reply]
"""A client's reply by costs alone: bytes and FLOPs as they will be, tensors on the meta device."""


class PlainHalf:
    """The server's half where the clients train and send parts of the model."""

    interleaved = False
    layers: ServerLayers | None = None

    def connect(self, request: Request) -> AbstractContextManager[SplitLink | None]:
        """Nothing to connect to: the clients hold the whole model."""
        return nullcontext()

    def train(self, loop: Rounds, round: int) -> list[str]:
        """The sampled clients train."""
        return loop.train_clients(round)

    def begin_group(self, round: int) -> None:
        """Nothing to prepare."""

    def end_group(self, round: int) -> Weights:
        """Nothing of the server's own has changed."""
        return {}

    def collect(self, round: int, client: str, phase: Phase, plan: Plan) -> tuple[Weights, Traffic]:
        """Nothing passed beside the parts."""
        return {}, ()

    def finish(self, loop: Rounds, round: int) -> None:
        """Nothing is left to hand out."""


@dataclass(frozen=True)
class Exchange:
    """A payload's protocol.

    Attributes:
        payload: its name.
        permission: what leaves a client, in words for whoever has to permit it.
        handlers: the client's half: phase -> what a client does in it.
        sends: whether a plan leads to anything leaving the client.
        fits: whether a request is one that its method's own plan for the round makes; a site refuses others.
        server: makes the server's half.
        dry_handlers: the client's half as a forecast plays it.
        dry_server: the server's half as a forecast plays it.
        forecast: figures of a forecast beside bytes and FLOPs, for one client's lengths; empty for none.
        notes: what a user should know before the first round, a sentence each; of a job, the model's parts, the
            number of clients and the tokens of all their examples.
    """

    payload: Payload
    permission: str
    handlers: Handlers
    sends: Callable[[Plan], bool]
    fits: Callable[[Request, Plan], bool]
    server: Callable[[ServerContext], Half]
    dry_handlers: Mapping[Phase, DryHandler]
    dry_server: Callable[[DryContext], Half]
    forecast: Callable[[DryContext, Index], dict[str, Any]]
    notes: Callable[[Job, Parts, int, int], list[str]]


def fits_plan(request: Request, plan: Plan) -> bool:
    """Whether a request trains by this plan, or trains and sends nothing, of layers once each and in order."""
    asked = request.plan
    in_order = asked.layers == tuple(range(len(asked.layers)))
    idle = in_order and not (asked.train or asked.send)
    alike = (asked.keep, asked.server, asked.freeze_encoder) == (plan.keep, plan.server, plan.freeze_encoder)
    return {
        "train": asked == plan,
        "evaluate": idle and alike,
        "receive": idle,
        **dict.fromkeys(SUM_PHASES, asked == plan),
    }.get(request.phase, False)


def nothing_more(context: DryContext, lengths: Index) -> dict[str, Any]:
    """A forecast of bytes and FLOPs alone."""
    return {}


def no_notes(job: Job, parts: Parts, clients: int, tokens: int) -> list[str]:
    """Nothing that a user of federated learning does not expect."""
    return []
