"""The server's side of split training: layers that the clients' batches pass through."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedstrata.core.client import Request, Weights, Worker
from fedstrata.core.optimiser import Pace, adamw, memory_of, step
from fedstrata.core.parts import Tensors, tensors
from fedstrata.core.rng import Dice
from fedstrata.core.server import Server
from fedstrata.core.store import Store
from fedstrata.cost.ledger import size
from fedstrata.nn.cut import through
from fedstrata.wire.activations import (
    gradients_in,
    lengths_in,
    of_gradients,
    of_states,
    states_in,
    unpack,
)  # fmt: skip

Traffic = Counter[tuple[str, str]]
"""(direction, what) -> bytes of tensors that crossed the cut."""


@dataclass
class Layers:
    """The layers that the server holds.

    Attributes:
        worker: a model that has them.
        server: whose weights they start from.
        names: the parts, such as ``("layer.0", "layer.1")``.
        copies: each client has a copy of its own, to be averaged; else there is one, which all visit.
        longest: most tokens of a text.
        folder: the server's own disk, for what the optimisers remember.
    """

    worker: Worker
    server: Server
    names: tuple[str, ...]
    copies: bool
    longest: int
    folder: Path
    results: dict[str, tuple[Weights, Traffic]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = self.worker.parts.shapes
        self.trained = {
            name: self.worker.model.get_parameter(name) for part in self.names for name in shapes[part]
        }
        self.optimiser: torch.optim.Optimizer | None = None
        self.round = -1
        self.thread = ThreadPoolExecutor(1, "layers")
        self.stepping: Future[None] | None = None

    def begin(self, round: int) -> None:
        """Make ready for the clients who train at once, or for the next in turn."""
        if self.copies:
            return
        self._load()
        if self.optimiser is None or self.round != round or not self.worker.local.kept:
            self.optimiser = self._optimiser(round, "all")
        self.round = round

    def visit(self, request: Request) -> Visit:
        """The way through the layers for one request."""
        learns = request.phase == "train"
        if self.copies or not learns:
            self._load()
        optimiser = None
        if learns:
            optimiser = self._optimiser(request.round, request.client) if self.copies else self.optimiser
        return Visit(self, request, optimiser)

    def step(self, optimiser: torch.optim.Optimizer, rate: float) -> None:
        """Begin one step of the layers; meanwhile the client goes on with what is its own."""
        self.stepping = self.thread.submit(step, optimiser, rate)

    def settle(self) -> None:
        """Wait for the step that was begun; before it is done nothing may use the layers."""
        stepping, self.stepping = self.stepping, None
        if stepping:
            stepping.result()

    def leave(self, visit: Visit) -> None:
        """A client has trained, or been scored: what it left behind waits for :meth:`taken`."""
        self.settle()
        request = visit.request
        made: Weights = {}
        if self.copies and visit.optimiser:
            made = self._copy()
            self._remember(request.round, request.client, visit.optimiser)
        self.results[request.client] = made, visit.traffic

    def taken(self, client: str) -> tuple[Weights, Traffic]:
        """The client's copy of the layers, if it had one, and the bytes of its messages; told once."""
        return self.results.pop(client)

    def end(self, round: int) -> Weights:
        """What the one set of layers has become; nothing where there are copies."""
        if self.copies:
            return {}
        assert self.optimiser is not None
        self._remember(round, "all", self.optimiser)
        return self._copy()

    def _load(self) -> None:
        server = self.server
        self.worker.load({part: (("server", server.versions[part]), server.weights[part]) for part in self.names})
        for parameter in self.trained.values():
            parameter.requires_grad_(True)

    def _optimiser(self, round: int, whose: str) -> torch.optim.Optimizer:
        for part in self.names:
            self.worker.tags[part] = None
        local = self.worker.local
        return adamw(self.trained, local, Store(self.folder / whose).load(round) if local.kept else {})

    def _remember(self, round: int, whose: str, optimiser: torch.optim.Optimizer) -> None:
        if self.worker.local.kept:
            Store(self.folder / whose).save(round, memory_of(optimiser, self.trained))

    def _copy(self) -> Weights:
        model, parts = self.worker.model, self.worker.parts
        return {
            part: {name: t.to("cpu", copy=True) for name, t in tensors(model, parts, [part]).items()}
            for part in self.names
        }


class Visit:
    """One client's way through the server's layers: the other end of :class:`fedstrata.nn.cut.Link`."""

    def __init__(self, layers: Layers, request: Request, optimiser: torch.optim.Optimizer | None) -> None:
        worker = layers.worker
        self.layers, self.worker = layers, worker
        self.request, self.optimiser = request, optimiser
        self.stack = [worker.model.get_submodule(f"{worker.parts.stack}.{part[6:]}") for part in layers.names]
        self.dice = Dice(
            worker.streams.integer(request.round, request.client, "dropout of the server"), worker.model.device
        )
        self.pace = Pace(1, 1)
        self.steps = 0
        self.traffic: Traffic = Counter()

    def begin(self, pace: Pace) -> None:
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
        hidden = unpack(rows, lengths, worker.local.width)
        mask = (torch.arange(hidden.shape[1], device=device) < lengths[:, None]).long()
        learns = self.optimiser is not None
        self.layers.settle()
        for layer in self.stack:
            layer.train(learns)
        with torch.set_grad_enabled(learns), self.dice.thrown(), worker.autocast():
            hidden = hidden.detach().requires_grad_(learns)
            out = through(worker.model.config, self.stack, hidden, mask)
        self.hidden, self.out, self.lengths = hidden, out, lengths
        return self._count("down", of_states(out.detach(), lengths, worker.dtype), "activations")

    def backward(self, message: Tensors) -> Tensors:
        """The gradient of the loss by the states that came, from that by those that went; then a step begins.

        Raises:
            WireError: the message is not :func:`fedstrata.wire.activations.of_gradients` of the last batch.
        """
        assert self.optimiser is not None
        worker = self.worker
        self._count("up", message, "gradients")
        rows = gradients_in(message, int(self.lengths.sum()), worker.parts.hidden, worker.dtype)
        gradient = unpack(rows.to(self.out.device), self.lengths, self.out.shape[1])
        torch.autograd.backward(self.out, gradient.to(self.out.dtype))
        assert self.hidden.grad is not None
        reply = of_gradients(self.hidden.grad, self.lengths, worker.dtype)  # with the weights of before the step
        self.layers.step(self.optimiser, self.pace.rate(worker.local, self.steps))
        self.steps += 1
        return self._count("down", reply, "gradients")

    def _count(self, direction: str, message: Tensors, what: str) -> Tensors:
        self.traffic[direction, what] += size(message)
        return message
