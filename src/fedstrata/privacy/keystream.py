"""Random numbers for noise: a cipher's stream (ChaCha20), so that numbers which were seen tell of no others.

Noise over a weight that did not change is read off the message, to many digits. The state of a common generator
is found from its output (PCG64's from 512 bytes: Bouillaguet, Martinez and Sauvage 2020), and then all its noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

Words = npt.NDArray[np.uint64]
PIECE = 1 << 15
"""Numbers drawn at a time: so few that they stay in a core's cache."""


class Keystream:
    """The numbers of one key.

    Args:
        key: 32 bytes.
        numbers: numbers the streams that are apart from this one; none may come twice.
    """

    def __init__(self, key: bytes, numbers: Iterator[int] | None = None) -> None:
        self.key, self.numbers = key, count() if numbers is None else numbers
        nonce = bytes(8) + next(self.numbers).to_bytes(8, "little")  # the first half counts blocks
        self._cipher = Cipher(ChaCha20(key, nonce), mode=None).encryptor()
        self._buffers: tuple[bytearray, torch.Tensor, torch.Tensor] | None = None

    def apart(self, streams: int) -> list[Keystream]:
        """So many streams of the same key that share no number with this one or with one another."""
        return [Keystream(self.key, self.numbers) for _ in range(streams)]

    def integers(self, below: int, size: int) -> npt.NDArray[np.int64]:
        """Integers of 0 to ``below`` - 1, each exactly as likely as the others; ``below`` of 1 to 2^63."""
        words, most = self._words(size), (1 << 64) - (1 << 64) % below - 1
        again = np.flatnonzero(words > np.uint64(most))
        while len(again):  # beyond the last whole multiple of ``below``
            words[again] = self._words(len(again))
            again = again[words[again] > np.uint64(most)]
        return (words % np.uint64(below)).astype(np.int64)

    def normal(self, size: int) -> torch.Tensor:
        """Independent normal numbers ``[size]``, fp64, by Box and Muller's formula; the next call overwrites them.

        None is beyond 9.35, where one in 10^20 would be.

        Raises:
            ValueError: more than :data:`PIECE` at once.
        """
        if size > PIECE:
            raise ValueError(f"{size} numbers at once; expected {PIECE} at most")
        if self._buffers is None:  # kept: fresh memory takes as long as the numbers
            radius, made = (torch.empty(numbers, dtype=torch.float64) for numbers in (PIECE // 2, PIECE))
            self._buffers = bytearray(8 * PIECE), radius, made
        content, radius, made = self._buffers
        half = (size + 1) // 2
        self._cipher.update_into(bytes(16 * half), content)
        words = torch.frombuffer(content, dtype=torch.int64, count=2 * half)
        radius, cosine, sine = radius[:half], made[:half], made[half : 2 * half]
        # 2^-63 to 1, and so fine near 0 that the tails are too
        radius.copy_(words[:half].bitwise_and_((1 << 63) - 1)).add_(1).mul_(2.0**-63)
        radius.log_().mul_(-2).sqrt_()
        cosine.copy_(words[half:]).mul_(math.pi * 2.0**-63)
        torch.sin(cosine, out=sine).mul_(radius)
        cosine.cos_().mul_(radius)
        return made[:size]

    def _words(self, size: int) -> Words:
        """The next integers of 64 bits, ``[size]``."""
        words = np.empty(size, "<u8")
        self._cipher.update_into(bytes(8 * size), words.view(np.uint8).data)
        return words
