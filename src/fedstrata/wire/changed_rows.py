"""A session that sends of a batch's tokens those alone that tell something new: ``[wire] activations_changed``.

    up      activations [k, H], activations:rows, lengths [B] int32, examples [B] int32, read
    down    activations [r, H]
    up      gradients [g, H], gradients:rows, wanted [1] uint8
    down    gradients [d, H], gradients:rows; nothing where they are not wanted

``…:rows`` and ``read`` are bitmaps of the batch's ``n`` tokens, ``[n / 8]`` uint8; each names at least one.

* Hidden states on the way up: a token's are sent if they moved by more than the threshold, relative to their
  length, from those that the server holds of the same example at that place. Both ends keep what was last sent,
  as it arrived, until the session ends; so errors do not add up, and no token is further off than the threshold.
  ``examples`` are numbers that mean nothing to the server.
* The layers' output on the way down: at the ``r`` tokens that the client's layers above the cut ``read``.
* Gradients: at tokens where they are not 0. That changes nothing, and of no gradient an older one is used.

With threshold 0 training gives the same bits as where all tokens travel.
"""

from __future__ import annotations

import torch

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.wire.activations import (
    GRADIENTS,
    STATES,
    StreamForm,
    decode_gradients,
    decode_lengths,
    decode_states,
    encode_gradient_rows,
    pack,
)
from fedstrata.wire.codec import WireError
from fedstrata.wire.packing import code_bytes, pack_codes, unpack_codes
from fedstrata.wire.row_cache import RowCache
from fedstrata.wire.rows import decode_rows, encode_rows

ROWS = ":rows"
"""Ends the name of the bitmap of the tokens whose rows a message holds."""


class ChangedClient:
    """The client's end.

    Args:
        form: how rows travel.
        threshold: how far a state has to move, as a share of its length, to be sent.
        cache: what the server holds.

    Attributes:
        examples: numbers of the batch's examples, ``[B]``; set before each batch.
        read: tokens at which the output is read, bool ``[n]``; set before each batch.
    """

    def __init__(self, form: StreamForm, threshold: float, cache: RowCache) -> None:
        self.form, self.threshold, self.cache = form, threshold, cache
        self.examples = self.read = torch.empty(0)

    def send_states(self, hidden: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """See :class:`fedstrata.wire.stream_ends.ClientEnd`."""
        rows, lengths = pack(hidden, lengths), lengths.int().cpu()
        every = {name: tensor.cpu() for name, tensor in encode_rows(STATES, rows, self.form.states).items()}
        arrives = decode_rows(STATES, every, rows.shape[1], self.form.states)
        held, there = self.cache.of(self.examples, lengths)
        sent = _one_at_least(~there | _moved(arrives, held, self.threshold))
        self.cache.put(self.examples, lengths, torch.where(sent[:, None], arrives, held))
        self.read, self.width = _one_at_least(self.read), rows.shape[1]
        return {
            **{name: tensor[sent] for name, tensor in every.items()},
            STATES + ROWS: _bitmap(sent),
            "lengths": lengths,
            "examples": self.examples.int(),
            "read": _bitmap(self.read),
        }

    def receive_states(self, message: Tensors) -> torch.Tensor:
        """See :class:`fedstrata.wire.stream_ends.ClientEnd`."""
        rows = decode_states(message, int(self.read.sum()), self.width, self.form.states)
        return _spread(rows, self.read)

    def send_gradients(self, gradients: torch.Tensor, lengths: torch.Tensor, wanted: bool) -> Tensors:
        """See :class:`fedstrata.wire.stream_ends.ClientEnd`.

        Raises:
            UserError: the loss depends on tokens that were not read.
        """
        rows = pack(gradients, lengths).cpu()
        if bool((rows != 0).any(1)[~self.read].any()):
            raise UserError(
                "[wire] activations_changed: the loss depends on hidden states at other tokens than the task's "
                "batches predict at (positions, targets); leave the key out"
            )
        self.wanted = wanted
        return {**_some_gradients(rows, self.form), "wanted": torch.tensor([wanted], dtype=torch.uint8)}

    def receive_gradients(self, message: Tensors) -> torch.Tensor:
        """See :class:`fedstrata.wire.stream_ends.ClientEnd`."""
        if self.wanted:
            return _read_gradients(message, len(self.read), self.width, self.form)
        if message:
            raise WireError("gradients: were not asked for")
        return torch.zeros(len(self.read), self.width)


class ChangedServer:
    """The server's end.

    Args:
        form: how rows travel.
        longest: most tokens of a text.
        texts: most texts of a batch; without a bound few bytes could name more tokens than memory holds.
        cache: what came of each example in this session, and in no other.
    """

    def __init__(self, form: StreamForm, longest: int, texts: int, cache: RowCache) -> None:
        self.form, self.longest, self.texts = form, longest, texts
        self.cache, self.width = cache, cache.width

    def receive_states(self, message: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`fedstrata.wire.stream_ends.ServerEnd`."""
        lengths = decode_lengths(message, self.longest, self.texts)
        self.tokens = int(lengths.sum())
        examples = _numbers(message, len(lengths))
        self.read = _tokens(message, "read", self.tokens)
        sent = _tokens(message, STATES + ROWS, self.tokens)
        own = ("lengths", "examples", "read", STATES + ROWS)
        states = {name: tensor for name, tensor in message.items() if name not in own}
        rows = decode_states(states, int(sent.sum()), self.width, self.form.states)
        held, there = self.cache.of(examples, lengths)
        if bool((~sent & ~there).any()):
            raise WireError(f"{STATES}{ROWS}: leaves out tokens of an example that is not held")
        held[sent] = rows
        self.cache.put(examples, lengths, held)
        return held, lengths

    def send_states(self, out: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """See :class:`fedstrata.wire.stream_ends.ServerEnd`."""
        rows = pack(out, lengths)
        return encode_rows(STATES, rows[self.read.to(rows.device)], self.form.states)

    def receive_gradients(self, message: Tensors) -> torch.Tensor:
        """See :class:`fedstrata.wire.stream_ends.ServerEnd`."""
        wanted = message.get("wanted", torch.empty(0))
        if wanted.dtype != torch.uint8 or wanted.shape != (1,) or int(wanted) > 1:
            raise WireError("wanted: must be one number, 0 or 1 (uint8)")
        self.wanted = bool(wanted)
        gradients = {name: tensor for name, tensor in message.items() if name != "wanted"}
        return _read_gradients(gradients, self.tokens, self.width, self.form)

    def send_gradients(self, gradients: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        """See :class:`fedstrata.wire.stream_ends.ServerEnd`."""
        return _some_gradients(pack(gradients, lengths).cpu(), self.form) if self.wanted else {}

    def close(self) -> None:
        """Forget what came."""
        self.cache.close()


def _moved(now: torch.Tensor, before: torch.Tensor, threshold: float) -> torch.Tensor:
    """Rows that differ by more than ``threshold`` of the length that they had; of 0, that differ at all.

    Rows that are not finite have moved: whoever receives them refuses them.
    """
    if threshold == 0:
        return (now != before).any(1)
    still: torch.Tensor = (now - before).norm(dim=1) <= threshold * before.norm(dim=1)
    return ~still


def _some_gradients(rows: torch.Tensor, form: StreamForm) -> Tensors:
    """The rows that are not 0."""
    sent = _one_at_least((rows != 0).any(1))
    return {**encode_gradient_rows(rows[sent], form.gradients), GRADIENTS + ROWS: _bitmap(sent)}


def _read_gradients(message: Tensors, tokens: int, width: int, form: StreamForm) -> torch.Tensor:
    """The rows of all tokens, those not sent 0."""
    sent = _tokens(message, GRADIENTS + ROWS, tokens)
    gradients = {name: tensor for name, tensor in message.items() if name != GRADIENTS + ROWS}
    return _spread(decode_gradients(gradients, int(sent.sum()), width, form.gradients), sent)


def _one_at_least(chosen: torch.Tensor) -> torch.Tensor:
    """At least the first, so that no message is without a row."""
    if not bool(chosen.any()):
        chosen = torch.zeros_like(chosen)
        chosen[0] = True
    return chosen


def _spread(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``rows`` at the places that are true, 0 elsewhere."""
    every: torch.Tensor = rows.new_zeros(len(places), rows.shape[1])
    every[places.to(rows.device)] = rows
    return every


def _bitmap(chosen: torch.Tensor) -> torch.Tensor:
    return pack_codes(chosen.to(torch.uint8), 1)


def _tokens(message: Tensors, name: str, tokens: int) -> torch.Tensor:
    """A bitmap's tokens, bool ``[tokens]``, checked."""
    packed = message.get(name, torch.empty(0))
    if packed.dtype != torch.uint8 or packed.shape != (code_bytes(tokens, 1),):
        raise WireError(f"{name}: must be one bit for each of {tokens} tokens (uint8)")
    bits = unpack_codes(packed, 8 * len(packed), 1).bool()
    if bool(bits[tokens:].any()) or not bool(bits.any()):
        raise WireError(f"{name}: must name at least one token, and none beyond the {tokens} of the batch")
    return bits[:tokens]


def _numbers(message: Tensors, texts: int) -> torch.Tensor:
    """The numbers of a batch's examples, checked."""
    examples = message.get("examples", torch.empty(0))
    if examples.dtype != torch.int32 or examples.shape != (texts,):
        raise WireError("examples: must be one number for each text (int32)")
    if int(examples.min()) < 0 or len(set(examples.tolist())) < texts:
        raise WireError("examples: must be different numbers from 0 up")
    return examples
