"""The two ends of a session through layers that the server holds: what a batch's messages are made of and read as.

Of the messages of :mod:`fedstrata.wire.activations` all tokens travel, whatever was sent before; with
``[wire] activations_changed`` they are those of :mod:`fedstrata.wire.changed_rows`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.activations import (
    STATES,
    StreamForm,
    decode_gradients,
    decode_lengths,
    decode_states,
    encode_gradients,
    encode_states,
)
from fedstrata.wire.changed_rows import ChangedClient, ChangedServer
from fedstrata.wire.row_cache import RowCache


class ClientEnd(Protocol):
    """The client's end, for one batch after another."""

    def send_states(self, hidden: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """The message of a batch's hidden states ``[B, S, H]``."""

    def receive_states(self, message: Tensors) -> torch.Tensor:
        """The server's output ``[n, H]``; 0 at tokens that were not asked for."""

    def send_gradients(self, gradients: torch.Tensor, lengths: torch.Tensor, wanted: bool) -> Tensors:
        """The message of the gradients by that output, ``[B, S, H]``; ``wanted``: those by the states are too."""

    def receive_gradients(self, message: Tensors) -> torch.Tensor:
        """The gradients by the states, ``[n, H]``; 0 where they are not needed."""


class ServerEnd(Protocol):
    """The server's end. What a client sends is checked.

    Raises:
        WireError: from both ``receive_…``, if a message is not what the client's end makes.
    """

    def receive_states(self, message: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch's hidden states ``[n, H]``, and the tokens of its texts ``[B]``."""

    def send_states(self, out: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """The message of the layers' output ``[B, S, H]``."""

    def receive_gradients(self, message: Tensors) -> torch.Tensor:
        """The gradients ``[n, H]`` by the output."""

    def send_gradients(self, gradients: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """The message of the gradients ``[B, S, H]`` by the states."""

    def close(self) -> None:
        """The session is over."""


class PlainClient:
    """The client's end where all tokens travel."""

    def __init__(self, form: StreamForm) -> None:
        self.form = form

    def send_states(self, hidden: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """See :class:`ClientEnd`."""
        message = encode_states(hidden, lengths, self.form.states)
        self.tokens, self.width = len(message[STATES]), hidden.shape[-1]
        return {**message, "lengths": lengths.int().cpu()}

    def receive_states(self, message: Tensors) -> torch.Tensor:
        """See :class:`ClientEnd`."""
        return decode_states(message, self.tokens, self.width, self.form.states)

    def send_gradients(self, gradients: torch.Tensor, lengths: torch.Tensor, wanted: bool) -> Tensors:
        """See :class:`ClientEnd`."""
        return encode_gradients(gradients, lengths, self.form.gradients)

    def receive_gradients(self, message: Tensors) -> torch.Tensor:
        """See :class:`ClientEnd`."""
        return decode_gradients(message, self.tokens, self.width, self.form.gradients)


class PlainServer:
    """The server's end where all tokens travel.

    Args:
        form: how they travel.
        width: of the hidden states.
        longest: most tokens of a text.
        texts: most texts of a batch; one long text would pad any number of short ones.
    """

    def __init__(self, form: StreamForm, width: int, longest: int, texts: int) -> None:
        self.form, self.width, self.longest, self.texts = form, width, longest, texts

    def receive_states(self, message: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ServerEnd`."""
        lengths = decode_lengths(message, self.longest, self.texts)
        states = {name: tensor for name, tensor in message.items() if name != "lengths"}
        self.tokens = int(lengths.sum())
        return decode_states(states, self.tokens, self.width, self.form.states), lengths

    def send_states(self, out: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """See :class:`ServerEnd`."""
        return encode_states(out, lengths, self.form.states)

    def receive_gradients(self, message: Tensors) -> torch.Tensor:
        """See :class:`ServerEnd`."""
        return decode_gradients(message, self.tokens, self.width, self.form.gradients)

    def send_gradients(self, gradients: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """See :class:`ServerEnd`."""
        return encode_gradients(gradients, lengths, self.form.gradients)

    def close(self) -> None:
        """Nothing is kept."""


def client_end(form: StreamForm, width: int, folder: Path, room: int) -> ClientEnd:
    """The client's end of a session; with ``form.changed`` it keeps up to ``room`` bytes under ``folder``."""
    if form.changed is None:
        return PlainClient(form)
    return ChangedClient(form, form.changed, RowCache(folder, width, room))


def server_end(form: StreamForm, width: int, longest: int, texts: int, folder: Path, room: int) -> ServerEnd:
    """The server's end of a session; with ``form.changed`` it keeps up to ``room`` bytes under ``folder``.

    Args:
        form: how the session's messages travel.
        width: of the hidden states.
        longest: most tokens of a text.
        texts: most texts of a batch.
        folder: where there is room.
        room: bytes of it.
    """
    if form.changed is None:
        return PlainServer(form, width, longest, texts)
    return ChangedServer(form, longest, texts, RowCache(folder, width, room))
