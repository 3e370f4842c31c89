"""Changes of a part as they travel: few bits, few entries, a size that shapes and settings alone decide.

    codes      uint8   of each entry that is sent the sign, and its absolute value in ``bits - 1`` bits, packed
    scales     bf16    of each group of entries the mean absolute value (1 bit), or the least and the largest level
    places     uint8   which entries are sent: those of the largest absolute values; with ``density`` below 1
    window     int16   of a rotated change instead: which of the rotated entries, in every block the same

A part is one vector, its tensors in the order of their names. With ``density`` 1 a group is a vector, a row of a
matrix, or a column where rows have fewer than 64 entries and columns have more than they: B of an adapter has rows
as short as its rank. Below 1 it is 128 entries in the order of their places, or fewer at the end. What a message
omits the next sends.
``rotation`` multiplies blocks of 1,024 entries by random signs and a Hadamard matrix, after which all entries are
alike, normally distributed (DRIVE, Vargaftik et al. 2021; EDEN, Vargaftik et al. 2022), so that it does not matter
which are sent.

Only additions and multiplications of single entries decode a message, so every machine comes to the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import Shapes, Spec, WireError
from fedstrata.wire.packing import (
    code_bytes,
    pack_codes,
    pack_places,
    place_bytes,
    unpack_codes,
    unpack_places,
)
from fedstrata.wire.rotation import block_size, in_blocks, rotate

GROUP = 128
"""Entries with scales of their own, where they are neither row nor column."""
ROW = 64
"""A row with fewer entries has no scales of its own beside longer columns."""
ITERATIONS = 3
"""Of Lloyd's algorithm, for the two levels of 2 bits."""


@dataclass(frozen=True)
class ChangeForm:
    """How changes travel in one direction.

    Attributes:
        bits: of an entry: 8, 4, 2 or 1.
        density: share of a part's entries that a message holds.
        rotation: see the module.
    """

    bits: int = 8
    density: float = 1.0
    rotation: bool = False

    def kept(self, total: int) -> int:
        """Entries that a message holds of a part of so many."""
        if self.rotation:
            return -(-total // block_size(total)) * self.width(total)
        return max(1, round(self.density * total)) if total else 0

    def width(self, total: int) -> int:
        """Entries that are sent of a rotated block."""
        return max(1, round(self.density * block_size(total)))

    @property
    def in_lines(self) -> bool:
        """Every entry is sent as it stands."""
        return self.density == 1 and not self.rotation


def change_spec(shapes: Shapes, form: ChangeForm) -> Spec:
    """What a message holds of a part with tensors of these shapes."""
    total = sum(map(math.prod, shapes.values()))
    kept = form.kept(total)
    groups = sum(_lines(shape)[0] for shape in shapes.values()) if form.in_lines else -(-kept // GROUP)
    spec: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "codes": (torch.uint8, (code_bytes(kept, form.bits),)),
        "scales": (torch.bfloat16, (groups,) if form.bits == 1 else (groups, 2)),
    }
    if form.density < 1:
        places = (torch.uint8, (place_bytes(total, kept),))
        spec |= {"window": (torch.int16, (1,))} if form.rotation else {"places": places}
    return spec


def encode_change(change: Tensors, form: ChangeForm) -> Tensors:
    """A change of a part, fp32, as it travels."""
    if form.in_lines:
        made = [_quantize(_as_lines(change[name]), form.bits) for name in sorted(change)]
        codes = torch.cat([codes.flatten() for codes, _ in made])
        return {"codes": pack_codes(codes, form.bits), "scales": torch.cat([scales for _, scales in made])}
    flat = torch.cat([change[name].flatten() for name in sorted(change)])
    message: Tensors = {}
    if form.rotation:
        blocks, width = rotate(in_blocks(flat)), form.width(len(flat))
        start = _window(blocks, width)
        kept = blocks[:, start : start + width].flatten()
        if form.density < 1:
            message["window"] = torch.tensor([start], dtype=torch.int16)
    else:
        places = _largest(flat, form.kept(len(flat)))
        kept = flat[places]
        message["places"] = pack_places(places.numpy(), len(flat))
    codes, scales = _quantize_groups(kept, form.bits)
    return {"codes": pack_codes(codes, form.bits), "scales": scales, **message}


def decode_change(message: Tensors, shapes: Shapes, form: ChangeForm) -> Tensors:
    """The change that a message holds, fp32.

    Raises:
        WireError: its places or its window are none.
    """
    total = sum(map(math.prod, shapes.values()))
    kept = form.kept(total)
    codes = unpack_codes(message["codes"], kept, form.bits)
    if form.in_lines:
        return _decode_lines(codes, message["scales"], shapes, form.bits)
    values = _dequantize(_filled(codes), message["scales"], form.bits).flatten()[:kept]
    if form.rotation:
        width = form.width(total)
        start = _checked_window(message, total, form)
        blocks = torch.zeros(kept // width, block_size(total))
        blocks[:, start : start + width] = values.view(-1, width)
        flat = rotate(blocks, back=True).flatten()[:total]
    else:
        flat = torch.zeros(total)
        flat[_checked_places(message, total, kept)] = values
    return _split(flat, shapes)


def check_change(message: Tensors, shapes: Shapes, form: ChangeForm) -> None:
    """Check the content of a message whose names, shapes, types and finite values have been checked.

    Raises:
        WireError: a scale is below 0, or places or window are none.
    """
    if message["scales"].numel() and float(message["scales"].amin()) < 0:
        raise WireError("scales: must be 0 or more")
    total = sum(map(math.prod, shapes.values()))
    if form.density < 1 and form.rotation:
        _checked_window(message, total, form)
    elif form.density < 1:
        _checked_places(message, total, form.kept(total))


def _checked_places(message: Tensors, total: int, kept: int) -> torch.Tensor:
    try:
        return torch.from_numpy(unpack_places(message["places"], kept, total))
    except ValueError as error:
        raise WireError(f"places: {error}") from None


def _checked_window(message: Tensors, total: int, form: ChangeForm) -> int:
    start, last = int(message["window"]) if "window" in message else 0, block_size(total) - form.width(total)
    if not 0 <= start <= last:
        raise WireError(f"window: must begin from 0 to {last}")
    return start


# Which entries


def _largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """The places ``[count]``, ascending, of the largest absolute values; of equal ones the first."""
    size = flat.abs().nan_to_num_(torch.inf, torch.inf)  # what is not finite is sent, and refused
    least = float(np.partition(size.numpy(), -count)[-count]) if count else torch.inf  # faster than torch's topk
    places = torch.nonzero(size >= least).flatten()
    larger_first = torch.argsort(size[places] == least, stable=True)
    return places[larger_first[:count].sort().values]


def _window(blocks: torch.Tensor, width: int) -> int:
    """Where in the blocks ``[n, B]`` those adjacent entries begin that hold the most."""
    last = blocks.shape[1] - width
    starts = torch.tensor([*range(0, last, width), last])
    sums = torch.nn.functional.pad(blocks.square().sum(0, dtype=torch.float64).cumsum(0), (1, 0))
    return int(starts[(sums[starts + width] - sums[starts]).argmax()])


# How an entry is sent


def _quantize(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[n, m]`` uint8 and scales ``[n]`` or ``[n, 2]`` bf16 of rows ``[n, m]``."""
    size, sign = rows.abs(), (rows < 0).to(torch.uint8)
    if bits == 1:
        return sign, size.mean(1).to(torch.bfloat16)
    low, high = _two_means(size) if bits == 2 else size.aminmax(dim=1)
    scales = torch.stack([low, high], 1).to(torch.bfloat16)
    first, step = _levels(scales, bits)
    levels = ((size - first) / step).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(0, 2 ** (bits - 1) - 1)
    return levels.to(torch.uint8) | (sign << (bits - 1)), scales


def _quantize_groups(entries: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[n]`` and scales of entries ``[n]`` in groups of 128; the last group is what remains, by itself."""
    whole = len(entries) // GROUP * GROUP
    groups = [entries[:whole].view(-1, GROUP), *([entries[None, whole:]] if whole < len(entries) else [])]
    made = [_quantize(each, bits) for each in groups]
    return torch.cat([codes.flatten() for codes, _ in made]), torch.cat([scales for _, scales in made])


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows ``[n, m]`` of codes and scales."""
    sign: torch.Tensor = 1 - 2 * (codes >> (bits - 1)).float()
    if bits == 1:
        return sign * scales.float()[:, None]
    first, step = _levels(scales, bits)
    rows: torch.Tensor = sign * (first + step * (codes & (2 ** (bits - 1) - 1)).float())
    return rows


def _levels(scales: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least absolute value of a row and the step to the next, ``[n, 1]`` each."""
    low, high = scales.float().unbind(1)
    return low[:, None], ((high - low) / (2 ** (bits - 1) - 1))[:, None]


def _two_means(size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of absolute values the two levels of least error, ``[n]`` each (Lloyd's algorithm)."""
    middle = size.mean(1, keepdim=True)
    low = high = middle
    for _ in range(ITERATIONS):
        above = size > middle
        many, summed = above.sum(1, keepdim=True), (size * above).sum(1, keepdim=True)
        high = torch.where(many > 0, summed / many, middle)
        low = (size * ~above).sum(1, keepdim=True) / (size.shape[1] - many).clamp(min=1)
        middle = (low + high) / 2
    return low.flatten(), high.flatten()


# Rows and columns


def _lines(shape: tuple[int, ...]) -> tuple[int, int, bool]:
    """How many groups a tensor has, entries of each, and whether they are columns; a vector is one."""
    rows = shape[0] if len(shape) > 1 else 1
    length = math.prod(shape) // max(1, rows)
    turned = length < min(rows, ROW)
    return (length, rows, True) if turned else (rows, length, False)


def _as_lines(tensor: torch.Tensor) -> torch.Tensor:
    count, length, turned = _lines(tuple(tensor.shape))
    return tensor.reshape(length, count).T.contiguous() if turned else tensor.reshape(count, length)


def _decode_lines(codes: torch.Tensor, scales: torch.Tensor, shapes: Shapes, bits: int) -> Tensors:
    decoded: Tensors = {}
    names = sorted(shapes)
    each = torch.split(codes, [math.prod(shapes[name]) for name in names])
    own = torch.split(scales, [_lines(shapes[name])[0] for name in names])
    for name, part, scale in zip(names, each, own, strict=True):
        count, length, turned = _lines(shapes[name])
        lines = _dequantize(part.view(count, length), scale, bits)
        decoded[name] = (lines.T if turned else lines).reshape(shapes[name])
    return decoded


def _split(flat: torch.Tensor, shapes: Shapes) -> Tensors:
    names = sorted(shapes)
    each = torch.split(flat, [math.prod(shapes[name]) for name in names])
    return {name: part.view(shapes[name]) for name, part in zip(names, each, strict=True)}


def _filled(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[n]`` in groups ``[g, 128]``; what fills the last one stands for no entry."""
    return torch.nn.functional.pad(codes, (0, -len(codes) % GROUP)).view(-1, GROUP)
