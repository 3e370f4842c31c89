"""Split learning: a model some of whose layers the server holds; hidden states go there and come back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from fedstrata.errors import UserError
from fedstrata.models.depth import in_stack
from fedstrata.models.families import SPLITTABLE
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.wire.activations import unpack
from fedstrata.wire.stream_ends import ClientEnd


class SplitLink(Protocol):
    """A client's connection to the server's layers, for one round.

    Messages are those of :mod:`fedstrata.wire.activations`.
    """

    def begin(self, span: ScheduleSpan) -> None:
        """Open the session with the client's place in the learning-rate schedule; before the first step."""

    def forward(self, message: Tensors) -> Tensors:
        """The server's forward pass: the layers' output for a batch of hidden states."""

    def backward(self, message: Tensors) -> Tensors:
        """The server's backward pass and step: the gradient by its input, given that by its output."""


class CutLayer(nn.Module):
    """Takes the place of the server's layers in a client's stack.

    Attributes:
        link: the connection to them.
        end: makes and reads the messages.
        lengths: tokens of each text of the current batch, ``[B]``; set before each forward pass.
    """

    def __init__(self, link: SplitLink, end: ClientEnd) -> None:
        super().__init__()
        self.link, self.end = link, end
        self.lengths = torch.empty(0)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Send ``[B, S, H]``, return the server's output; autograd stops here, see :meth:`fetch`."""
        reply = self.link.forward(self.end.send_states(hidden.detach(), self.lengths))
        states = self.end.receive_states(reply).to(hidden.device)
        received = unpack(states, self.lengths, hidden.shape[1])
        self.sent, self.received = hidden, received.requires_grad_(torch.is_grad_enabled())
        return self.received

    def fetch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that were sent, and the loss's gradient by them, which the server computes."""
        assert self.received.grad is not None
        wanted = self.sent.requires_grad
        reply = self.link.backward(self.end.send_gradients(self.received.grad, self.lengths, wanted))
        gradients = self.end.receive_gradients(reply).to(self.sent.device)
        return self.sent, unpack(gradients, self.lengths, self.sent.shape[1]).to(self.sent.dtype)


def cut_at(model: nn.Module, parts: Parts, plan: Plan, cut: CutLayer) -> AbstractContextManager[None]:
    """Inside the context, ``cut`` takes the place of the plan's server layers in the model's stack."""
    server = parts.depths(plan.server)
    away = [j for j, i in enumerate(plan.layers) if i in server]

    def build(stack: nn.ModuleList) -> list[nn.Module]:
        own = [stack[i] for i in plan.layers]
        return [*own[: away[0]], cut, *own[away[-1] + 1 :]]

    return in_stack(model, parts, build)


def through(
    config: transformers.PreTrainedConfig, layers: list[nn.Module], hidden: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The output of a model's layers for hidden states ``[B, S, H]``; ``mask`` ``[B, S]`` is 1 at tokens."""
    causal = config.model_type == "gpt2" or getattr(config, "is_decoder", False)
    make: Any = create_causal_mask if causal else create_bidirectional_mask
    options = {"past_key_values": None} if causal else {}
    seen = make(config=config, inputs_embeds=hidden, attention_mask=mask, **options)
    for layer in layers:
        hidden = layer(hidden, attention_mask=seen)
    return hidden


def check_cut(parts: Parts) -> None:
    """Refuse a model that cannot be split.

    Raises:
        UserError: its architecture is not splittable, or its head takes more than the last hidden state.
    """
    if parts.architecture not in SPLITTABLE:
        raise UserError(f"model: {parts.architecture!r} cannot be split; expected one of: {', '.join(SPLITTABLE)}")
    if parts.head_layers:
        raise UserError(
            "[head] kind: takes the hidden states of four layers; in split learning the client has only the last"
        )
