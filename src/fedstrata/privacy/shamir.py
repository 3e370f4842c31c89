"""Shamir's secret sharing (1979) of 32 bytes over the integers modulo ``2 ** 256 + 297``, the next prime.

A secret is the value at 0 of a polynomial with random coefficients; a share is its value at 1, 2, 3, ...
Any ``threshold`` shares give the polynomial, and fewer say nothing of its value at 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = (1 << 256) + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
"""Of a number below :data:`PRIME`."""


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret at 1, 2, ..., ``count``, any ``threshold`` of which give it."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"{len(secret)} bytes among {count} with threshold {threshold}")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    polynomial = [*coefficients, int.from_bytes(secret, "big")]  # highest power first
    return [_value(polynomial, x).to_bytes(SHARE_BYTES, "big") for x in range(1, count + 1)]


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of as many shares as the threshold, by where they were taken; of others something else.

    Raises:
        ValueError: they are no shares, or not of 32 bytes.
    """
    values = {x: int.from_bytes(share, "big") for x, share in shares.items()}
    if not values or any(not 0 < x < PRIME for x in values) or any(y >= PRIME for y in values.values()):
        raise ValueError("no shares")
    total = 0
    for x, y in values.items():
        above, below = 1, 1
        for other in values:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        total = (total + y * above * pow(below, -1, PRIME)) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise ValueError("shares of different secrets")
    return total.to_bytes(SECRET_BYTES, "big")


def _value(polynomial: list[int], x: int) -> int:
    total = 0
    for coefficient in polynomial:
        total = (total * x + coefficient) % PRIME
    return total
