"""The server's side of split learning: layers that the clients' batches pass through."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.optimizer import add_proximal, anchor_of, learning_rate, make_optimizer, memory_of, step
from fedstrata.client.trainer import autocast
from fedstrata.client.working_model import WorkingModel
from fedstrata.job.tables import Train
from fedstrata.models.cut import through
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import SERVER_DROPOUT, Streams
from fedstrata.server.replica import LayerReplica
from fedstrata.server.server import Server
from fedstrata.wire.activations import GRADIENTS, STATES, StreamForm, unpack
from fedstrata.wire.codec import WireError, payload_bytes
from fedstrata.wire.finite import all_finite
from fedstrata.wire.store import Store
from fedstrata.wire.stream_ends import server_end

Traffic = Counter[tuple[str, str]]
"""(direction, what) -> bytes of tensors that passed between a client and the server's layers."""


@dataclass(frozen=True)
class LayerSettings:
    """How the server's layers are held.

    Attributes:
        names: the parts, such as the layers 0 and 1, with their adapters.
        copies: each client has a copy of its own, to be averaged; else there is one, which all share.
        max_positions: most tokens of a text.
        form: how hidden states and gradients travel.
        store: the server's own disk, for the optimizers' memory.
    """

    names: tuple[str, ...]
    copies: bool
    max_positions: int
    form: StreamForm
    store: Store


@dataclass
class ServerLayers:
    """The layers that the server holds and trains.

    Sessions may be open at once, each in a thread of its own: one computes at a time, under ``lock``. Whose turn
    it is on one set of layers is for the engine to say; with copies a session takes a free replica, the working
    model's own before others, which are made only where several sessions are open.

    Attributes:
        working: a model that has them.
        server: whose weights they start from.
        settings: which, and how.
        train: the job's ``[train]``.
        streams: all randomness.
    """

    working: WorkingModel
    server: Server
    settings: LayerSettings
    train: Train
    streams: Streams
    results: dict[str, tuple[Weights, Traffic]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, parts = self.working.model, self.working.parts
        names = self.settings.names
        held = {name: model.get_parameter(name) for part in names for name in parts.shapes[part]}
        self.learning = parts.adapted(part for part in names if parts[part].kind == "layer")
        own = LayerReplica(
            modules=[model.get_submodule(f"{parts.stack}.{i}") for i in parts.depths(names)],
            held=held,
            trained={name: held[name] for part in self.learning for name in parts.shapes[part]},
        )
        self.replicas = [own]
        self.lock = threading.RLock()
        self.optimizer: torch.optim.Optimizer | None = None
        self.round = -1
        self.thread = ThreadPoolExecutor(1, "layers")

    @property
    def persist(self) -> bool:
        """The optimizers' memory goes on from round to round."""
        return self.train.optimizer_state == "persist"

    def begin(self, round: int) -> None:
        """Make ready for the clients that train interleaved, or for the next in sequence."""
        if self.settings.copies:
            return
        with self.lock:
            [replica] = self.replicas
            self._load(replica)
            if self.optimizer is None or self.round != round or not self.persist:
                self.optimizer = self._optimizer(replica, round, "all")
            self.round = round

    @contextmanager
    def connect(self, request: Request) -> Iterator[SplitSession]:
        """A session for one request; left by an exception it is abandoned."""
        session = self.open(request)
        try:
            yield session
        except BaseException:
            self.abandon(session)
            raise
        self.close(session)

    def open(self, request: Request) -> SplitSession:
        """A session for one request; :meth:`close` or :meth:`abandon` ends it."""
        trains = request.phase == "train"
        with self.lock:
            replica = self._free() if self.settings.copies else self.replicas[0]
            replica.in_use = True
            if self.settings.copies or not trains:
                self._load(replica)
            optimizer = None
            if trains:
                optimizer = self.optimizer
                if self.settings.copies:
                    optimizer = self._optimizer(replica, request.round, request.client)
            return SplitSession(self, request, replica, optimizer)

    def step(self, replica: LayerReplica, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Begin one step of the layers; meanwhile the client goes on with its own layers."""

        def work() -> None:
            add_proximal(replica.anchor, self.train)
            step(optimizer, rate)

        replica.stepping = self.thread.submit(work)

    def wait(self) -> None:
        """Wait for every step that was begun."""
        for replica in self.replicas:
            replica.wait()

    def close(self, session: SplitSession) -> None:
        """A client has trained, or been scored: the result waits for :meth:`collect`."""
        session.end.close()
        with self.lock:
            session.replica.wait()
            request, weights = session.request, {}
            if self.settings.copies and session.optimizer:
                weights = self._copy(session.replica)
                self._remember(session.replica, request.round, request.client, session.optimizer)
            self.results[request.client] = weights, session.traffic
            session.replica.in_use = False

    def abandon(self, session: SplitSession) -> None:
        """A client has broken off: its copy is forgotten; steps of the one shared set of layers stay made."""
        session.end.close()
        with self.lock:
            session.replica.in_use = False
            session.replica.wait()

    def collect(self, client: str) -> tuple[Weights, Traffic]:
        """The client's copy of the layers, if it had one, and the bytes of its messages; once."""
        return self.results.pop(client)

    def end(self, round: int) -> Weights:
        """What the one set of layers has become; nothing where there are copies."""
        if self.settings.copies:
            return {}
        assert self.optimizer is not None
        with self.lock:
            self.wait()
            self._remember(self.replicas[0], round, "all", self.optimizer)
            return self._copy(self.replicas[0])

    def _free(self) -> LayerReplica:
        for replica in self.replicas:
            if not replica.in_use:
                return replica
        self.replicas.append(self.replicas[0].another())
        return self.replicas[-1]

    def _load(self, replica: LayerReplica) -> None:
        server, names = self.server, self.settings.names
        if replica is self.replicas[0]:
            self.working.load({part: (("server", server.versions[part]), server.weights[part]) for part in names})
        else:
            for part in names:
                for name, tensor in server.weights[part].items():
                    replica.held[name].detach().copy_(tensor)
        for name, parameter in replica.held.items():
            parameter.requires_grad_(name in replica.trained)
        replica.anchor = anchor_of(replica.trained.values(), self.train)

    def _optimizer(self, replica: LayerReplica, round: int, whose: str) -> torch.optim.Optimizer:
        if replica is self.replicas[0]:
            self.working.changed(self.settings.names)
        memory = self.settings.store.below(whose).load(round) if self.persist else {}
        return make_optimizer(replica.trained, self.train, memory)

    def _remember(self, replica: LayerReplica, round: int, whose: str, optimizer: torch.optim.Optimizer) -> None:
        if self.persist:
            self.settings.store.below(whose).save(round, memory_of(optimizer, replica.trained))

    def _copy(self, replica: LayerReplica) -> Weights:
        shapes = self.working.parts.shapes
        return {
            part: {name: replica.trained[name].detach().to("cpu", copy=True) for name in shapes[part]}
            for part in self.learning
        }


class SplitSession:
    """A client's way through the server's layers: the other end of :class:`fedstrata.models.cut.SplitLink`."""

    def __init__(
        self,
        layers: ServerLayers,
        request: Request,
        replica: LayerReplica,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.layers, self.request, self.replica, self.optimizer = layers, request, replica, optimizer
        self.device = layers.working.device
        seed = layers.streams.integer(request.round, request.client, SERVER_DROPOUT)
        self.dropout = DropoutRng(seed, self.device)
        self.span = ScheduleSpan(1, 1)
        self.steps = 0
        self.traffic: Traffic = Counter()
        settings = layers.settings
        self.end = server_end(
            form=settings.form if optimizer else settings.form.plain,
            width=layers.working.parts.hidden,
            longest=settings.max_positions,
            texts=layers.train.batch_size * (1 if optimizer else 2),  # a batch that is scored has twice as many
            folder=settings.store.folder,
            room=layers.train.feature_cache_bytes,
        )

    def begin(self, span: ScheduleSpan) -> None:
        """The position of the client's steps in the learning-rate schedule."""
        self.span = span

    def forward(self, message: Tensors) -> Tensors:
        """The layers' output for a batch's hidden states.

        Raises:
            WireError: the message is not what the client's end makes, or too large for the layers.
        """
        layers = self.layers
        rows, lengths = self.end.receive_states(message)
        lengths = lengths.to(self.device)
        self._count("up", message, "activations")
        hidden = unpack(rows.to(self.device), lengths, layers.train.width)
        mask = (torch.arange(hidden.shape[1], device=self.device) < lengths[:, None]).long()
        trains = self.optimizer is not None
        with layers.lock:
            self.replica.wait()
            for layer in self.replica.modules:
                layer.train(trains)
            with torch.set_grad_enabled(trains), self.dropout.fork(), autocast(self.device, layers.train):
                hidden = hidden.detach().requires_grad_(trains)
                out = through(layers.working.model.config, self.replica.modules, hidden, mask)
        if not all_finite(out.detach()):
            raise WireError(f"{STATES}: the server's layers make of them what is not finite")
        self.hidden, self.out, self.lengths = hidden, out, lengths
        return self._count("down", self.end.send_states(out.detach(), lengths), "activations")

    def backward(self, message: Tensors) -> Tensors:
        """The loss's gradient by the states that came in, from that by those that went out; then a step begins.

        Raises:
            WireError: the message is not what the client's end makes of the last batch, or spoils the step.
        """
        assert self.optimizer is not None
        layers = self.layers
        self._count("up", message, "gradients")
        rows = self.end.receive_gradients(message)
        gradient = unpack(rows.to(self.out.device), self.lengths, self.out.shape[1])
        with layers.lock:
            torch.autograd.backward(self.out, gradient.to(self.out.dtype))
            assert self.hidden.grad is not None
            if not (all_finite(self.hidden.grad) and self.replica.gradients_are_finite()):
                self.optimizer.zero_grad(set_to_none=True)
                raise WireError(f"{GRADIENTS}: the server's layers make of them what is not finite")
            reply = self.end.send_gradients(self.hidden.grad, self.lengths)  # with the weights before the step
            layers.step(self.replica, self.optimizer, learning_rate(layers.train, self.span, self.steps))
        self.steps += 1
        return self._count("down", reply, "gradients")

    def _count(self, direction: str, message: Tensors, what: str) -> Tensors:
        self.traffic[direction, what] += payload_bytes(message)
        return message
