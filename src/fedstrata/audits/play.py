"""One round of one client, played through the client's own code, and what the server then holds of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from fedstrata.audits.bench import Bench
from fedstrata.client.answer import ClientData
from fedstrata.client.feature_cache import FEATURES
from fedstrata.engines.local import LocalEngine
from fedstrata.errors import UserError
from fedstrata.exchanges.exchange import ServerContext
from fedstrata.exchanges.hidden_states import PART, collecting_plan
from fedstrata.job.tables import Train
from fedstrata.models.checkpoints import max_positions
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import Index, Tensors, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.server.rounds import Half
from fedstrata.server.server import Server
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.wire.activations import GRADIENTS, STATES
from fedstrata.wire.codec import WireError
from fedstrata.wire.store import Store

OUTPUTS = "outputs"
"""What the server's layers answer."""


@dataclass(frozen=True)
class Seen:
    """One batch that the client trained on: the truth of an attack.

    Attributes:
        index: its examples.
        batch: as the model saw it.
        originals: the examples' token ids before any were masked.
    """

    index: Index
    batch: Batch
    originals: list[Index]


@dataclass(frozen=True)
class Played:
    """A client's round, as the server holds it, and the truth.

    Attributes:
        plan: what was asked.
        train: how the client trained.
        reply: what it answered.
        before: sent part -> its tensors as server and client held them, fp32; without those that are omitted.
        after: sent part -> the same tensors as the server decodes what came.
        sent: the tensors of a message of hidden states, as they came.
        stream: (what, message) of what passed to the server's layers, and of what they put out, in order.
        examples: all texts.
        index: the client's.
        seen: the batches; empty where the client does not train.
    """

    plan: Plan
    train: Train
    reply: Reply
    before: Weights
    after: Weights
    sent: Tensors
    stream: list[tuple[str, Tensors]]
    examples: Examples
    index: Index
    seen: list[Seen]

    def token_ids(self, vocabulary: int, special: Index) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which token ids stand in the texts that the client used, special ones left out, ``[V]``."""
        found = np.zeros(vocabulary, dtype=bool)
        texts = [ids for seen in self.seen for ids in seen.originals]
        if self.sent:
            texts = [np.asarray(self.examples.tokens[i], dtype=np.int64) for i in self.index]
        for ids in texts:
            found[ids] = True
        found[special] = False
        return found

    @property
    def texts(self) -> int:
        """How often a text was used; of hidden states, how many texts they are of."""
        return len(self.index) if self.sent else sum(len(seen.index) for seen in self.seen)


class TaskRecorder:
    """The client's task, and a record of every batch it makes."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen: list[Seen] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        """See :class:`fedstrata.tasks.Task`."""
        made = self.task.batch(examples, index, rng, width)
        self.seen.append(Seen(index, made, [np.asarray(examples.tokens[i], dtype=np.int64) for i in index]))
        return made


@dataclass
class LinkRecorder:
    """A client's link to the server's layers, and a copy of what passes."""

    link: SplitLink
    stream: list[tuple[str, Tensors]]

    def begin(self, span: ScheduleSpan) -> None:
        """See :class:`fedstrata.models.cut.SplitLink`."""
        self.link.begin(span)

    def forward(self, message: Tensors) -> Tensors:
        """See :class:`fedstrata.models.cut.SplitLink`."""
        self.stream.append((STATES, _as_bytes(message)))
        reply = self.link.forward(message)
        self.stream.append((OUTPUTS, _as_bytes(reply)))
        return reply

    def backward(self, message: Tensors) -> Tensors:
        """See :class:`fedstrata.models.cut.SplitLink`."""
        self.stream.append((GRADIENTS, _as_bytes(message)))
        return self.link.backward(message)


@dataclass
class _Recorded:
    half: Half
    stream: list[tuple[str, Tensors]] = field(default_factory=list)

    @contextmanager
    def connect(self, request: Request) -> Iterator[SplitLink | None]:
        with self.half.connect(request) as link:
            yield None if link is None else LinkRecorder(link, self.stream)


def play(
    bench: Bench,
    client: str,
    examples: Examples,
    index: Index,
    train: Train,
    until: float | None = None,
    features: Path | None = None,
) -> Played:
    """Play the round of a client with the given texts.

    Args:
        bench: the stage; the plan is that of its client.
        client: name under which the random streams are drawn.
        examples: all texts.
        index: the client's.
        train: how it trains.
        until: share of the run's learning-rate schedule that it passes through; None for that of the round.
        features: where hidden states of a frozen encoder are kept for other plays of the same texts, if anywhere.
    """
    ready, runtime = bench.ready, bench.runtime
    task = TaskRecorder(runtime.trainer.task)
    runtime = replace(runtime, trainer=replace(runtime.trainer, task=task, train=train))
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        store = Store(Path(folder))
        server = Server(bench.parts, dict(bench.start), runtime.wire)
        labels = bench.data.labels
        context = ServerContext(
            method=bench.job.method,
            server=server,
            runtime=runtime,
            clients=(client,),
            plan=bench.plan,
            classes=None if labels is None else len(labels),
            max_positions=max_positions(ready.loaded.model),
            store=store,
        )
        recorded = _Recorded(bench.exchange.server(context))
        engine = LocalEngine(
            runtimes=[runtime],
            handlers=bench.exchange.handlers,
            data={client: ClientData(examples, index, ready.test, {}, _own_store(store, features))},
            shared={part: server.held(part) for part in bench.parts.names},
            connect=recorded.connect,
            interleaved=False,
            tell=bench.tell,
        )
        request = _request(bench, server, client, until)
        recorded.half.begin_group(0)
        [reply] = engine.exchange([request])
    return _received(bench, server, request, reply, _Truth(train, examples, index, task.seen, recorded.stream))


def _own_store(store: Store, features: Path | None) -> Store:
    """What the client keeps; hidden states of a frozen encoder go to a folder that outlives the play."""
    own = store.below("client")
    if features is not None:
        features.mkdir(parents=True, exist_ok=True)
        own.folder.mkdir(parents=True, exist_ok=True)
        (own.folder / FEATURES).symlink_to(features, target_is_directory=True)
    return own


@dataclass(frozen=True)
class _Truth:
    """What the client had, and what passed the cut."""

    train: Train
    examples: Examples
    index: Index
    seen: list[Seen]
    stream: list[tuple[str, Tensors]]


def _received(bench: Bench, server: Server, request: Request, reply: Reply, truth: _Truth) -> Played:
    """The reply as the server decodes it.

    Raises:
        UserError: the server would refuse it.
    """
    wire, plan = bench.ready.runtime.wire, request.plan
    try:
        server.check(plan, reply)
    except WireError as error:
        raise UserError(
            f"audit: what {reply.client} sends cannot be used: {error}; if its training diverged, a smaller "
            "train.learning_rate helps"
        ) from None
    came = {part: _as_bytes(tensors) for part, tensors in reply.weights.items()}
    before = {part: server.received(part) for part in plan.send}
    after = {part: wire.decode(came[part], old if wire.changes else None, old) for part, old in before.items()}
    before, after = (_without_omitted(bench, weights) for weights in (before, after))
    return Played(plan=plan, reply=reply, before=before, after=after, sent=came.get(PART, {}), **vars(truth))


def _without_omitted(bench: Bench, weights: Weights) -> Weights:
    gone = bench.parts.sharing.omitted
    return {part: {name: t for name, t in own.items() if name not in gone} for part, own in weights.items()}


def _request(bench: Bench, server: Server, client: str, until: float | None) -> Request:
    """What the server asks in the round."""
    if bench.exchange.payload == "hidden_states":
        return server.request(0, client, collecting_plan(bench.parts), "hidden_states")
    begin, end = bench.span
    request = server.request(bench.round, client, bench.plan, "train")
    return replace(request, first=True, span=(begin, until or end))


def _as_bytes(tensors: Tensors) -> Tensors:
    """What a receiver reads from a message: through bytes, as between sites."""
    content = safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    )
    read: Tensors = safetensors.torch.load(content)
    return read


def flat(weights: Weights) -> Tensors:
    """The tensors of all parts by their names."""
    return {name: tensor for tensors in weights.values() for name, tensor in tensors.items()}
