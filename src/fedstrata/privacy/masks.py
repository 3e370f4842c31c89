"""Masks: streams of integers modulo ``2 ** (8 * width)`` that only who has a key can make, or take away."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedstrata.privacy.fixed_point import FixedPoint, Words

PIECE = 1 << 16
"""Integers of a mask that are made at a time."""
NONCE = bytes(16)
"""A key makes one stream and no more, so its nonce and counter begin at 0."""


def derive(secret: bytes, use: bytes) -> bytes:
    """A key of 32 bytes for one use of a secret (HKDF, RFC 5869, with SHA-256)."""
    return bytes(HKDF(SHA256(), 32, salt=None, info=use).derive(secret))


def add_mask(words: Words, key: bytes, fixed: FixedPoint, sign: int = 1) -> None:
    """Add the stream of a key (ChaCha20, RFC 8439) to words in place; with ``sign`` -1 take it away."""
    stream = Cipher(ChaCha20(key, NONCE), mode=None).encryptor()
    zeros = bytes(PIECE * fixed.width)
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        content = np.frombuffer(stream.update(zeros[: len(piece) * fixed.width]), np.uint8)
        if sign > 0:
            piece += fixed.unpack(content)
        else:
            piece -= fixed.unpack(content)
