"""Rows of numbers as they travel, such as the hidden states of tokens: in a float type, or in few bits with a
scale for each row; and of every row all entries, or the largest of them with their places.

    NAME          [n, k] in the float type or int8, [n, k / 2] uint8 with two entries of 4 bits each in a byte
    NAME:scale    [n] bf16, of int8 and int4: one step
    NAME:places   [n, b] uint8: which ``k`` of a row's ``H`` entries, ascending, in as many bytes for every row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import DTYPES, SCALE, Spec, WireError
from fedstrata.wire.finite import all_finite
from fedstrata.wire.packing import code_bytes, pack_codes, unpack_codes

PLACES = ":places"
"""Ends the name of the places of a row's entries."""
LEVELS = {"int8": 127, "int4": 7}
"""Type -> steps up to a row's largest value."""


@dataclass(frozen=True)
class RowForm:
    """How rows travel.

    Attributes:
        dtype: a float of :data:`fedstrata.wire.codec.DTYPES`, ``int8`` or ``int4``.
        density: share of a row's entries that a message holds.
    """

    dtype: str = "fp32"
    density: float = 1.0

    def kept(self, hidden: int) -> int:
        """Entries that a message holds of each row."""
        return max(1, round(self.density * hidden)) if self.density < 1 else hidden

    def row_bytes(self, hidden: int) -> int:
        """Bytes of each row."""
        kept = self.kept(hidden)
        values = -(-kept // 2) if self.dtype == "int4" else kept * DTYPES[self.dtype].itemsize
        scale = 2 if self.dtype in LEVELS else 0
        return values + scale + (_place_bytes(hidden, kept) if kept < hidden else 0)


def rows_spec(name: str, rows: int, hidden: int, form: RowForm) -> Spec:
    """What a message holds of rows ``[n, H]``."""
    kept = form.kept(hidden)
    width = -(-kept // 2) if form.dtype == "int4" else kept
    dtype = torch.uint8 if form.dtype == "int4" else DTYPES[form.dtype]
    spec: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {name: (dtype, (rows, width))}
    if form.dtype in LEVELS:
        spec[name + SCALE] = torch.bfloat16, (rows,)
    if kept < hidden:
        spec[name + PLACES] = torch.uint8, (rows, _place_bytes(hidden, kept))
    return spec


def encode_rows(name: str, rows: torch.Tensor, form: RowForm) -> Tensors:
    """Rows ``[n, H]`` as they travel."""
    hidden = rows.shape[1]
    kept = form.kept(hidden)
    message: Tensors = {}
    if kept < hidden:
        places = rows.abs().topk(kept, dim=1).indices.sort(dim=1).values
        rows = rows.gather(1, places)
        message[name + PLACES] = _pack_places(places, hidden)
    if form.dtype not in LEVELS:
        return {name: rows.to(DTYPES[form.dtype]), **message}
    most = LEVELS[form.dtype]
    scale = (rows.float().abs().amax(1) / most).to(torch.bfloat16)
    steps = (rows.float() / scale.float()[:, None]).nan_to_num(0.0, 0.0, 0.0).round().clamp(-most, most)
    if form.dtype == "int4":
        codes = torch.nn.functional.pad((steps + most).to(torch.uint8), (0, kept % 2))
        values = pack_codes(codes.flatten(), 4).view(len(rows), -1)
    else:
        values = steps.to(torch.int8)
    return {name: values, name + SCALE: scale, **message}


def decode_rows(name: str, message: Tensors, hidden: int, form: RowForm) -> torch.Tensor:
    """The rows ``[n, H]``, fp32, of a message that was checked against :func:`rows_spec`.

    Raises:
        WireError: the places of a row are none, or its numbers outgrow fp32 with their scale.
    """
    kept, values = form.kept(hidden), message[name]
    if form.dtype == "int4":
        codes = unpack_codes(values.flatten(), 2 * values.numel(), 4).view(len(values), -1)[:, :kept]
        values = codes.float() - LEVELS["int4"]
    if form.dtype in LEVELS:
        values = finite_product(name, values.float() * message[name + SCALE].float()[:, None])
    if kept == hidden:
        return values.float()
    try:
        places = _unpack_places(message[name + PLACES], kept, hidden)
    except ValueError as error:
        raise WireError(f"{name}{PLACES}: {error}") from None
    return torch.zeros(len(values), hidden, device=values.device).scatter_(1, places, values.float())


def finite_product(name: str, values: torch.Tensor) -> torch.Tensor:
    """Values that were multiplied by a scale of the message.

    Raises:
        WireError: they have outgrown fp32.
    """
    if not all_finite(values):
        raise WireError(f"{name}: are not finite once multiplied by their scale")
    return values


# Which entries: by Elias and Fano (see fedstrata.wire.packing), row by row


def _sizes(hidden: int, kept: int) -> tuple[int, int, int]:
    """Low bits of each place, and bits of the low and of the high parts of a row's; without low bits a bitmap."""
    width = max(0, (hidden // kept).bit_length() - 1)
    low, high = kept * width, kept + (hidden >> width) + 1
    if code_bytes(hidden, 1) <= code_bytes(low, 1) + code_bytes(high, 1):
        return 0, 0, hidden
    return width, low, high


def _place_bytes(hidden: int, kept: int) -> int:
    _, low, high = _sizes(hidden, kept)
    return code_bytes(low, 1) + code_bytes(high, 1)


def _pack_places(places: torch.Tensor, hidden: int) -> torch.Tensor:
    rows, kept = places.shape
    width, low, high = _sizes(hidden, kept)
    order = torch.arange(kept, device=places.device) if low else 0
    bits = places.new_zeros(rows, high).scatter_(1, (places >> width) + order, 1)
    lows = (places[:, :, None] >> torch.arange(width, device=places.device)) & 1
    return torch.cat([_pack_bits(lows.flatten(1)), _pack_bits(bits)], 1)


def _unpack_places(packed: torch.Tensor, kept: int, hidden: int) -> torch.Tensor:
    width, low, _ = _sizes(hidden, kept)
    bits = _unpack_bits(packed[:, code_bytes(low, 1) :])
    if not bool((bits.sum(1) == kept).all()):
        raise ValueError(f"must be {kept} in every row")
    places = bits.nonzero()[:, 1].view(-1, kept)
    if low:
        weights = 2 ** torch.arange(width, device=packed.device)
        lows = _unpack_bits(packed[:, : code_bytes(low, 1)])[:, :low].view(-1, kept, width)
        places = ((places - torch.arange(kept, device=packed.device)) << width) + (lows * weights).sum(2)
    if not bool((places.diff(dim=1) > 0).all()) or int(places.amax()) >= hidden:
        raise ValueError(f"must ascend in every row, below {hidden}")
    return places


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Bits ``[n, m]`` as bytes ``[n, m / 8]``."""
    filled = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (filled << torch.arange(8, device=bits.device)).sum(2).to(torch.uint8)


def _unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bits ``[n, 8 b]`` int64 of bytes ``[n, b]``."""
    bits: torch.Tensor = (packed[:, :, None].long() >> torch.arange(8, device=packed.device)) & 1
    return bits.flatten(1)
