from __future__ import annotations

import numpy as np

from fedstrata.privacy.fixed_point import fixed_point
from fedstrata.privacy.masks import PIECE, add_mask, derive


def test_a_key_is_that_of_the_rfc() -> None:
    """RFC 5869, test case 3: no salt, no info, 42 bytes, of which the first 32."""
    key = derive(bytes([0x0B] * 22), b"")
    assert key.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_a_stream_is_that_of_the_rfc() -> None:
    """RFC 8439, A.1, test vector 1: key, nonce and counter 0."""
    fixed = fixed_point(1)
    words = np.zeros(16, np.uint64)
    add_mask(words, bytes(32), fixed)
    assert fixed.pack(words).tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )


def test_what_is_added_is_taken_away_whatever_the_length() -> None:
    for total, size in ((1, 3), (5000, PIECE + 7), (1 << 30, 2 * PIECE)):
        fixed, key = fixed_point(total), derive(b"secret" * 8, b"use")
        start = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = start.copy()
        add_mask(words, key, fixed)
        masked = fixed.pack(words)
        assert len(np.unique(masked)) == min(256, len(np.unique(masked)))
        assert (words != start).mean() > 0.99
        words = fixed.unpack(masked)
        add_mask(words, key, fixed, -1)
        assert np.array_equal(fixed.signed(words), fixed.signed(start))


def test_a_mask_has_every_byte_equally_often() -> None:
    fixed = fixed_point(5000)
    words = np.zeros(1 << 17, np.uint64)
    add_mask(words, derive(bytes(32), b"other"), fixed)
    counts = np.bincount(fixed.pack(words), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 360  # chi square, 255 degrees: above it once in 10**5
