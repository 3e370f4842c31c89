"""The server's side of split training: layers that the clients' batches pass through."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.optimizer import learning_rate, make_optimizer, memory_of, step
from fedstrata.client.trainer import Worker
from fedstrata.cost.ledger import size
from fedstrata.models.cut import through
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.server.server import Server
from fedstrata.wire.activations import (
    gradients_in,
    lengths_in,
    of_gradients,
    of_states,
    states_in,
    unpack,
)  # fmt: skip
from fedstrata.wire.store import Store

Traffic = Counter[tuple[str, str]]
"""(direction, what) -> bytes of tensors that crossed the cut."""


@dataclass(eq=False)
class LayerReplica:
    """One set of the layers.

    Attributes:
        modules: the layers, from below.
        trained: their parameters, by the names they have in the model.
        taken: a client with a copy of its own is on its way through it.
        stepping: the step that was begun last.
    """

    modules: list[torch.nn.Module]
    trained: dict[str, torch.nn.Parameter]
    taken: bool = False
    stepping: Future[None] | None = None

    def another(self) -> LayerReplica:
        """A further set, whose weights are yet to be loaded."""
        return LayerReplica(*copy.deepcopy((self.modules, self.trained)))

    def settle(self) -> None:
        """Wait for the step that was begun; before it is done nothing may use the layers."""
        stepping, self.stepping = self.stepping, None
        if stepping:
            stepping.result()


@dataclass
class ServerLayers:
    """The layers that the server holds.

    Visits may be open at once and each in a thread of its own: one computes at a time, under ``lock``. Who visits
    one set of layers when is for the engine to say; with copies a visit takes a set that is free, the worker's own
    before others, which are made only where several visits are open.

    Attributes:
        worker: a model that has them.
        server: whose weights they start from.
        names: the parts, such as ``("layer.0", "layer.1")``.
        copies: each client has a copy of its own, to be averaged; else there is one, which all visit.
        longest: most tokens of a text.
        folder: the server's own disk, for what the optimizers remember.
    """

    worker: Worker
    server: Server
    names: tuple[str, ...]
    copies: bool
    longest: int
    folder: Path
    results: dict[str, tuple[Weights, Traffic]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, parts = self.worker.model, self.worker.parts
        own = LayerReplica(
            modules=[model.get_submodule(f"{parts.stack}.{part[6:]}") for part in self.names],
            trained={name: model.get_parameter(name) for part in self.names for name in parts.shapes[part]},
        )
        self.stacks = [own]
        self.lock = threading.RLock()
        self.optimizer: torch.optim.Optimizer | None = None
        self.round = -1
        self.thread = ThreadPoolExecutor(1, "layers")

    def begin(self, round: int) -> None:
        """Make ready for the clients who train at once, or for the next in turn."""
        if self.copies:
            return
        with self.lock:
            [stack] = self.stacks
            self._load(stack)
            if self.optimizer is None or self.round != round or self.worker.train.optimizer_state != "persist":
                self.optimizer = self._optimizer(stack, round, "all")
            self.round = round

    def visit(self, request: Request) -> SplitSession:
        """The way through the layers for one request; :meth:`leave` or :meth:`abandon` ends it."""
        learns = request.phase == "train"
        with self.lock:
            stack = self._free() if self.copies else self.stacks[0]
            stack.taken = True
            if self.copies or not learns:
                self._load(stack)
            optimizer = None
            if learns:
                optimizer = self.optimizer
                if self.copies:
                    optimizer = self._optimizer(stack, request.round, request.client)
            return SplitSession(self, request, stack, optimizer)

    def step(self, stack: LayerReplica, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Begin one step of the layers; meanwhile the client goes on with what is its own."""
        stack.stepping = self.thread.submit(step, optimizer, rate)

    def settle(self) -> None:
        """Wait for every step that was begun."""
        for stack in self.stacks:
            stack.settle()

    def leave(self, visit: SplitSession) -> None:
        """A client has trained, or been scored: what it left behind waits for :meth:`taken`."""
        with self.lock:
            visit.stack.settle()
            request = visit.request
            made: Weights = {}
            if self.copies and visit.optimizer:
                made = self._copy(visit.stack)
                self._remember(visit.stack, request.round, request.client, visit.optimizer)
            self.results[request.client] = made, visit.traffic
            visit.stack.taken = False

    def abandon(self, visit: SplitSession) -> None:
        """A client has broken off: its copy is forgotten; steps of the one set of layers stay made."""
        with self.lock:
            visit.stack.taken = False
            visit.stack.settle()

    def taken(self, client: str) -> tuple[Weights, Traffic]:
        """The client's copy of the layers, if it had one, and the bytes of its messages; told once."""
        return self.results.pop(client)

    def end(self, round: int) -> Weights:
        """What the one set of layers has become; nothing where there are copies."""
        if self.copies:
            return {}
        assert self.optimizer is not None
        with self.lock:
            self.settle()
            self._remember(self.stacks[0], round, "all", self.optimizer)
            return self._copy(self.stacks[0])

    def _free(self) -> LayerReplica:
        for stack in self.stacks:
            if not stack.taken:
                return stack
        self.stacks.append(self.stacks[0].another())
        return self.stacks[-1]

    def _load(self, stack: LayerReplica) -> None:
        server = self.server
        if stack is self.stacks[0]:
            new = {part: (("server", server.versions[part]), server.weights[part]) for part in self.names}
            self.worker.load(new)
        else:
            for part in self.names:
                for name, tensor in server.weights[part].items():
                    stack.trained[name].detach().copy_(tensor)
        for parameter in stack.trained.values():
            parameter.requires_grad_(True)

    def _optimizer(self, stack: LayerReplica, round: int, whose: str) -> torch.optim.Optimizer:
        for part in self.names if stack is self.stacks[0] else ():
            self.worker.tags[part] = None
        train = self.worker.train
        return make_optimizer(
            stack.trained,
            train,
            Store(self.folder / whose).load(round) if train.optimizer_state == "persist" else {},
        )

    def _remember(self, stack: LayerReplica, round: int, whose: str, optimizer: torch.optim.Optimizer) -> None:
        if self.worker.train.optimizer_state == "persist":
            Store(self.folder / whose).save(round, memory_of(optimizer, stack.trained))

    def _copy(self, stack: LayerReplica) -> Weights:
        shapes = self.worker.parts.shapes
        return {
            part: {name: stack.trained[name].detach().to("cpu", copy=True) for name in shapes[part]}
            for part in self.names
        }


class SplitSession:
    """One client's way through the server's layers: the other end of :class:`fedstrata.models.cut.SplitLink`."""

    def __init__(
        self, layers: ServerLayers, request: Request, stack: LayerReplica, optimizer: torch.optim.Optimizer | None
    ) -> None:
        worker = layers.worker
        self.layers, self.worker = layers, worker
        self.request, self.stack, self.optimizer = request, stack, optimizer
        self.dice = DropoutRng(
            worker.streams.integer(request.round, request.client, "dropout of the server"), worker.model.device
        )
        self.pace = ScheduleSpan(1, 1)
        self.steps = 0
        self.traffic: Traffic = Counter()

    def begin(self, pace: ScheduleSpan) -> None:
        """The client's steps are about to go like this."""
        self.pace = pace

    def forward(self, message: Tensors) -> Tensors:
        """What the layers make of a batch's hidden states.

        Raises:
            WireError: the message is not :func:`fedstrata.wire.activations.of_states` with lengths.
        """
        worker, device = self.worker, self.worker.model.device
        lengths = lengths_in(message, self.layers.longest).to(device)
        rest = {name: tensor for name, tensor in message.items() if name != "lengths"}
        self._count("up", message, "activations")
        rows = states_in(rest, int(lengths.sum()), worker.parts.hidden, worker.dtype).to(device)
        hidden = unpack(rows, lengths, worker.train.width)
        mask = (torch.arange(hidden.shape[1], device=device) < lengths[:, None]).long()
        learns = self.optimizer is not None
        with self.layers.lock:
            self.stack.settle()
            for layer in self.stack.modules:
                layer.train(learns)
            with torch.set_grad_enabled(learns), self.dice.fork(), worker.autocast():
                hidden = hidden.detach().requires_grad_(learns)
                out = through(worker.model.config, self.stack.modules, hidden, mask)
        self.hidden, self.out, self.lengths = hidden, out, lengths
        return self._count("down", of_states(out.detach(), lengths, worker.dtype), "activations")

    def backward(self, message: Tensors) -> Tensors:
        """The gradient of the loss by the states that came, from that by those that went; then a step begins.

        Raises:
            WireError: the message is not :func:`fedstrata.wire.activations.of_gradients` of the last batch.
        """
        assert self.optimizer is not None
        worker = self.worker
        self._count("up", message, "gradients")
        rows = gradients_in(message, int(self.lengths.sum()), worker.parts.hidden, worker.dtype)
        gradient = unpack(rows.to(self.out.device), self.lengths, self.out.shape[1])
        with self.layers.lock:
            torch.autograd.backward(self.out, gradient.to(self.out.dtype))
            assert self.hidden.grad is not None
            reply = of_gradients(
                self.hidden.grad, self.lengths, worker.dtype
            )  # with the weights of before the step
            self.layers.step(self.stack, self.optimizer, learning_rate(worker.train, self.pace, self.steps))
        self.steps += 1
        return self._count("down", reply, "gradients")

    def _count(self, direction: str, message: Tensors, what: str) -> Tensors:
        self.traffic[direction, what] += size(message)
        return message
