"""One client's session on the server's layers, and the sets of layers that sessions take."""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.optimizer import learning_rate
from fedstrata.client.trainer import autocast
from fedstrata.models.cut import through
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.plan.streams import SERVER_DROPOUT
from fedstrata.wire.activations import (
    decode_gradients,
    decode_lengths,
    decode_states,
    encode_gradients,
    encode_states,
    unpack,
)
from fedstrata.wire.codec import payload_bytes

if TYPE_CHECKING:
    from fedstrata.server.layers import ServerLayers

Traffic = Counter[tuple[str, str]]
"""(direction, what) -> bytes of tensors that passed between a client and the server's layers."""


@dataclass(eq=False)
class LayerReplica:
    """One set of the layers.

    Attributes:
        modules: the layers, from below.
        trained: their parameters, by the names they have in the model.
        in_use: reserved by an open session.
        stepping: the step that was begun last.
    """

    modules: list[torch.nn.Module]
    trained: dict[str, torch.nn.Parameter]
    in_use: bool = False
    stepping: Future[None] | None = None

    def another(self) -> LayerReplica:
        """A further set, whose weights are yet to be loaded."""
        return LayerReplica(*copy.deepcopy((self.modules, self.trained)))

    def wait(self) -> None:
        """Wait for the step that was begun; before it is done nothing may use the layers."""
        stepping, self.stepping = self.stepping, None
        if stepping:
            stepping.result()


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

    def begin(self, span: ScheduleSpan) -> None:
        """The position of the client's steps in the learning-rate schedule."""
        self.span = span

    def forward(self, message: Tensors) -> Tensors:
        """The layers' output for a batch's hidden states.

        Raises:
            WireError: the message is not :func:`fedstrata.wire.activations.encode_states` with lengths.
        """
        layers, dtype = self.layers, self.layers.settings.dtype
        lengths = decode_lengths(message, layers.settings.max_positions).to(self.device)
        states = {name: tensor for name, tensor in message.items() if name != "lengths"}
        self._count("up", message, "activations")
        rows = decode_states(states, int(lengths.sum()), layers.working.parts.hidden, dtype).to(self.device)
        hidden = unpack(rows, lengths, layers.train.width)
        mask = (torch.arange(hidden.shape[1], device=self.device) < lengths[:, None]).long()
        trains = self.optimizer is not None
        with layers.lock:
            self.replica.wait()
            for layer in self.replica.modules:
                layer.train(trains)
            with torch.set_grad_enabled(trains), self.dropout.fork(), autocast(self.device, layers.train):
                hidden = hidden.detach().requires_grad_(trains)
                out = through(layers.working.model.config, self.replica.modules, hidden, mask)
        self.hidden, self.out, self.lengths = hidden, out, lengths
        return self._count("down", encode_states(out.detach(), lengths, dtype), "activations")

    def backward(self, message: Tensors) -> Tensors:
        """The loss's gradient by the states that came in, from that by those that went out; then a step begins.

        Raises:
            WireError: the message is not :func:`fedstrata.wire.activations.encode_gradients` of the last batch.
        """
        assert self.optimizer is not None
        layers, dtype = self.layers, self.layers.settings.dtype
        self._count("up", message, "gradients")
        rows = decode_gradients(message, int(self.lengths.sum()), layers.working.parts.hidden, dtype)
        gradient = unpack(rows.to(self.out.device), self.lengths, self.out.shape[1])
        with layers.lock:
            torch.autograd.backward(self.out, gradient.to(self.out.dtype))
            assert self.hidden.grad is not None
            reply = encode_gradients(self.hidden.grad, self.lengths, dtype)  # with the weights before the step
            layers.step(self.replica, self.optimizer, learning_rate(layers.train, self.span, self.steps))
        self.steps += 1
        return self._count("down", reply, "gradients")

    def _count(self, direction: str, message: Tensors, what: str) -> Tensors:
        self.traffic[direction, what] += payload_bytes(message)
        return message
