"""What passes between a client and the server's layers, batch by batch: hidden states, and the loss's gradients.

    up      activations [n, H], lengths [B] int32     down    activations [n, H]
    up      gradients   [n, H]                        down    gradients   [n, H]

``n`` is the number of tokens of the ``B`` texts together: padding is not sent. Gradients in fp16 are scaled
by a power of two, which travels with them (fp32), since most would vanish otherwise. Either may travel in few
bits, or with the largest channels of each token alone (:mod:`fedstrata.wire.rows`), and of some tokens alone
(:mod:`fedstrata.wire.changed_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import WireError, check
from fedstrata.wire.rows import RowForm, decode_rows, encode_rows, finite_product, rows_spec

STATES, GRADIENTS = "activations", "gradients"
"""What passes, by its name in messages and records."""
HIGH = 2.0**10
"""The largest gradient of an fp16 message is scaled to about this: far below fp16's 65504."""


@dataclass(frozen=True)
class StreamForm:
    """How the messages of a session travel.

    Attributes:
        states: hidden states, both ways.
        gradients: their gradients, both ways.
        changed: in training only tokens are sent that tell something new, hidden states where they moved by more
            than this share of their length; None: all are.
    """

    states: RowForm
    gradients: RowForm
    changed: float | None = None

    @property
    def plain(self) -> StreamForm:
        """The same where all tokens are sent, as in scoring."""
        return replace(self, changed=None)


def stream_form(
    states: tuple[str, float], gradients: tuple[str, float], changed: float | None = None
) -> StreamForm:
    """The form of dtype and density of hidden states and of gradients, and of what moved."""
    return StreamForm(RowForm(*states), RowForm(*gradients), changed)


def pack(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The states ``[n, H]`` of all tokens of texts ``[B, S, H]``."""
    if int(lengths.min()) == states.shape[1]:
        return states.flatten(0, 1)
    return states[_inside(lengths, states.shape[1])]


def unpack(rows: torch.Tensor, lengths: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """The states of texts, ``[B, S, H]``, 0 at padding; ``S`` is ``width``, by default the longest text's."""
    width = width or int(lengths.max())
    if int(lengths.min()) == width:
        return rows.reshape(len(lengths), width, -1)
    states = rows.new_zeros(len(lengths), width, rows.shape[1])
    states[_inside(lengths, width)] = rows
    return states


def encode_states(states: torch.Tensor, lengths: torch.Tensor, form: RowForm) -> Tensors:
    """Hidden states ``[B, S, H]`` as they travel."""
    return encode_rows(STATES, pack(states, lengths), form)


def encode_gradients(gradients: torch.Tensor, lengths: torch.Tensor, form: RowForm) -> Tensors:
    """Gradients ``[B, S, H]`` as they travel."""
    return encode_gradient_rows(pack(gradients, lengths), form)


def encode_gradient_rows(packed: torch.Tensor, form: RowForm) -> Tensors:
    """Gradients ``[n, H]`` as they travel."""
    if form.dtype != "fp16":
        return encode_rows(GRADIENTS, packed, form)
    largest = packed.abs().amax().float().clamp(2.0**-100, 2.0**100)
    scale = torch.exp2((torch.tensor(HIGH).to(largest) / largest).log2().floor())
    return {**encode_rows(GRADIENTS, packed.float() * scale, form), "scale": scale.reshape(1).cpu()}


def decode_states(message: Tensors, tokens: int, hidden: int, form: RowForm) -> torch.Tensor:
    """The states ``[n, H]`` of a message, checked, fp32.

    Raises:
        WireError: it does not hold what :func:`encode_states` makes of so many tokens, or is not finite.
    """
    check(message, rows_spec(STATES, tokens, hidden, form))
    return decode_rows(STATES, message, hidden, form)


def decode_gradients(message: Tensors, tokens: int, hidden: int, form: RowForm) -> torch.Tensor:
    """The gradients ``[n, H]`` of a message, checked, fp32.

    Raises:
        WireError: it does not hold what :func:`encode_gradients` makes of so many tokens, or is not finite.
    """
    scale = message.get("scale")
    if (scale is None) == (form.dtype == "fp16"):
        raise WireError(f"scale: goes with gradients in fp16, these are {form.dtype}")
    gradients = {name: tensor for name, tensor in message.items() if name != "scale"}
    check(gradients, rows_spec(GRADIENTS, tokens, hidden, form))
    rows = decode_rows(GRADIENTS, gradients, hidden, form)
    if scale is None:
        return rows
    if scale.dtype != torch.float32 or scale.shape != (1,) or not 0 < float(scale) < float("inf"):
        raise WireError("scale: must be one number above 0 (fp32)")
    return finite_product(GRADIENTS, rows / scale.to(rows.device))


def decode_lengths(message: Tensors, longest: int, texts: int) -> torch.Tensor:
    """The lengths ``[B]`` of a message's texts, checked.

    Raises:
        WireError: they are no whole numbers from 1 to ``longest``, or more than ``texts`` of them.
    """
    lengths = message.get("lengths", torch.empty(0))
    if lengths.dtype != torch.int32 or lengths.ndim != 1 or len(lengths) == 0:
        raise WireError("lengths: must be one number for each text (int32)")
    if len(lengths) > texts:
        raise WireError(f"lengths: are of {len(lengths)} texts, a batch has {texts} at most")
    if int(lengths.min()) < 1 or int(lengths.max()) > longest:
        raise WireError(f"lengths: must be from 1 to {longest}")
    return lengths


def message_bytes(
    tokens: int, texts: int, hidden: int, form: StreamForm, steps: int = 1
) -> dict[tuple[str, str], int]:
    """(direction, what) -> bytes of the messages of ``steps`` steps, of texts of so many tokens together.

    With ``form.changed`` these are the most that they can be: all tokens told something new in every step.
    """
    states = tokens * form.states.row_bytes(hidden)
    gradients = tokens * form.gradients.row_bytes(hidden) + (4 * steps if form.gradients.dtype == "fp16" else 0)
    numbers, bitmap, flag = 0, 0, 0
    if form.changed is not None:
        numbers, bitmap, flag = 4 * texts, (tokens + 7 * steps) // 8, steps
    return {
        ("up", STATES): states + 4 * texts + numbers + 2 * bitmap,
        ("down", STATES): states,
        ("up", GRADIENTS): gradients + bitmap + flag,
        ("down", GRADIENTS): gradients + bitmap,
    }


def _inside(lengths: torch.Tensor, width: int) -> torch.Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]
