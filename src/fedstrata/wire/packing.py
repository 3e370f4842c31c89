"""Small numbers and sets of places as packed bytes, of a size that depends on their counts alone.

A set of ``k`` of ``n`` places travels as a bitmap of ``n`` bits, or by Elias and Fano: of the ascending places the
``w`` low bits as they are, the rest as a unary bitmap in which place ``i`` sets bit ``(place >> w) + i``. That is
a Golomb-Rice code of the gaps, filled up to the most bytes that it can take: about ``k (2 + log2(n / k))`` bits,
half a bit per place above the fewest possible. The smaller of the two is used, by ``n`` and ``k`` alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


def code_bytes(count: int, bits: int) -> int:
    """Bytes of so many codes of 1, 2, 4 or 8 bits."""
    return -(-count * bits // 8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes ``[n]`` uint8 below ``2**bits`` as bytes, the first code in the lowest bits."""
    each = 8 // bits
    filled = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
    packed: torch.Tensor = filled[:, 0].clone()
    for place in range(1, each):
        packed |= filled[:, place] << (place * bits)
    return packed


def unpack_codes(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The first ``count`` codes of bytes of :func:`pack_codes`, ``[count]`` uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: torch.Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[:count]


def place_bytes(total: int, count: int) -> int:
    """Bytes of :func:`pack_places`."""
    return min(_bitmap_bytes(total), sum(_sizes(total, count)))


def pack_places(places: Places, total: int) -> torch.Tensor:
    """A set of ``places`` ``[k]``, ascending, of ``total``, as bytes ``[place_bytes]``."""
    count = len(places)
    low, high = _sizes(total, count)
    if _bitmap_bytes(total) <= low + high:
        return torch.from_numpy(_bitmap(places, _bitmap_bytes(total)))
    width = _width(total, count)
    bits = (places[:, None] >> np.arange(width)) & 1
    lows = np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")
    return torch.from_numpy(np.concatenate([lows, _bitmap((places >> width) + np.arange(count), high)]))


def unpack_places(packed: torch.Tensor, count: int, total: int) -> Places:
    """The places ``[count]`` of a message of :func:`pack_places`, ascending.

    Raises:
        ValueError: they are not so many different places below ``total``.
    """
    content, (low, high) = packed.numpy(), _sizes(total, count)
    dense = _bitmap_bytes(total) <= low + high
    found = np.flatnonzero(np.unpackbits(content if dense else content[low:], bitorder="little"))
    if len(found) != count:
        raise ValueError(f"are {len(found)} places, must be {count}")
    places: Places = found
    if not dense:
        width = _width(total, count)
        bits = np.unpackbits(content[:low], count=count * width, bitorder="little").reshape(count, width)
        places = ((found - np.arange(count)) << width) + bits @ (1 << np.arange(width))
    if not (np.diff(places) > 0).all() or (count and places[-1] >= total):
        raise ValueError(f"are not ascending places below {total}")
    return places


def _width(total: int, count: int) -> int:
    """The low bits of a place."""
    return max(0, (total // max(1, count)).bit_length() - 1)


def _sizes(total: int, count: int) -> tuple[int, int]:
    """Bytes of the low and of the high bits."""
    width = _width(total, count)
    return code_bytes(count * width, 1), code_bytes(count + (total >> width) + 1, 1)


def _bitmap_bytes(total: int) -> int:
    return code_bytes(total, 1)


def _bitmap(places: Places, size: int) -> Bytes:
    bits = np.zeros(8 * size, np.uint8)
    bits[places] = 1
    return np.packbits(bits, bitorder="little")
