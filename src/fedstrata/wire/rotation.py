"""The rotation of a change: blocks times random signs and a Hadamard matrix, after which all entries are alike."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

BLOCK = 1024
"""Entries that are rotated together."""


def block_size(total: int) -> int:
    """Entries of a block: a power of two, not more than the next one above all."""
    return min(BLOCK, 1 << max(0, total - 1).bit_length())


def in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """A change ``[n]`` as blocks ``[b, B]``, the last filled up with zeros."""
    size = block_size(len(flat))
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def rotate(blocks: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Blocks ``[n, B]`` times random signs and the Hadamard matrix over its root; or from there back."""
    size = blocks.shape[1]
    signs = _signs(size)
    blocks = blocks if back else blocks * signs
    half = 1
    while half < size:
        pairs = blocks.view(-1, size // (2 * half), 2, half)
        one, other = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack([one + other, one - other], 2).view(-1, size)
        half *= 2
    blocks = blocks * (1 / math.sqrt(size))
    return blocks * signs if back else blocks


def _signs(size: int) -> torch.Tensor:
    """The same at both ends, for ever."""
    drawn = np.frombuffer(hashlib.shake_128(b"fedstrata rotation").digest(BLOCK // 8), np.uint8)
    return 1 - 2 * torch.from_numpy(np.unpackbits(drawn)[:size].astype(np.float32))
