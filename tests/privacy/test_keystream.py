"""Numbers of a key's stream: ChaCha20's by a reference of its own, normal and even, and no two streams alike."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from scipy import stats

from fedstrata.privacy.keystream import PIECE, Keystream

KEY = bytes(range(32))


def block(key: bytes, number: int, stream: int) -> bytes:
    """A block of ChaCha20's stream, word by word (Bernstein 2008: both counter and nonce have 64 bits)."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key)]
    start += struct.unpack("<4I", struct.pack("<QQ", number, stream))
    state = list(start)
    columns = [(i, i + 4, i + 8, i + 12) for i in range(4)]
    diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    for a, b, c, d in 10 * [*columns, *diagonals]:
        for to, other, turned, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[to] = (state[to] + state[other]) % 2**32
            mixed = state[turned] ^ state[to]
            state[turned] = (mixed << by | mixed >> (32 - by)) % 2**32
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(start, state, strict=True)))


def words(stream: int, size: int) -> list[int]:
    """The first integers of 64 bits of one of the key's streams."""
    content = b"".join(block(KEY, number, stream) for number in range(-(-size // 8)))
    return list(struct.unpack(f"<{size}Q", content[: 8 * size]))


def test_the_reference_is_chacha20() -> None:
    """RFC 8439, 2.3.2, whose nonce of 96 bits is what the halves of this one hold."""
    nonce = bytes.fromhex("000000090000004a00000000")
    first, rest = struct.unpack("<I", nonce[:4])[0], struct.unpack("<Q", nonce[4:])[0]
    made = block(bytes(range(32)), 1 | first << 32, rest)
    assert made[:16].hex() == "10f1e7e4d13b5915500fdd1fa32071c4"
    assert made[-16:].hex() == "b5129cd1de164eb9cbd083e8a2503c4e"


@pytest.mark.parametrize("size", [1, 6, 37])
def test_normal_numbers_are_those_of_the_formula(size: int) -> None:
    root = Keystream(KEY)
    _, other = root.apart(2)
    for number, stream in ((0, root), (2, other)):
        half = (size + 1) // 2
        drawn = words(number, 2 * half)
        radii = [math.sqrt(-2 * math.log((word % 2**63 + 1) / 2**63)) for word in drawn[:half]]
        angles = [math.pi * word / 2**63 for word in drawn[half:]]
        expected = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
        expected += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
        np.testing.assert_allclose(stream.normal(size).numpy(), expected[:size], rtol=1e-11, atol=1e-13)


def test_normal_numbers_are_normal_and_independent() -> None:
    stream = Keystream(KEY)
    drawn = np.stack([stream.normal(PIECE).numpy().copy() for _ in range(40)])
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 0.01
    assert len(np.unique(drawn)) == drawn.size
    far = (np.abs(drawn) > 4).sum()
    assert abs(far - drawn.size * 2 * stats.norm.sf(4)) < 5 * math.sqrt(drawn.size * 2 * stats.norm.sf(4))
    halves = drawn.reshape(-1, 2, PIECE // 2)  # both numbers of a pair have one radius
    for one, other in ((halves[:, 0], halves[:, 1]), (drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        for power in (1, 2):
            close = np.corrcoef(one.ravel() ** power, other.ravel() ** power)[0, 1]
            assert abs(close) < 5 / math.sqrt(one.size)


def test_integers_are_the_words_that_fit() -> None:
    below = 3 << 61  # of four words one is beyond the last multiple
    drawn, found = iter(words(0, 400)), Keystream(KEY).integers(below, 50)
    first = [next(drawn) for _ in range(50)]
    while again := [place for place, word in enumerate(first) if word >= 2 * below]:
        for place in again:
            first[place] = next(drawn)
    assert found.tolist() == [word % below for word in first]
    assert max(found) > 2**61


@pytest.mark.parametrize("below", [1, 2, 7, 1 << 32])
def test_integers_are_equally_likely(below: int) -> None:
    drawn = Keystream(KEY).integers(below, 140_000)
    assert drawn.min() >= 0
    assert drawn.max() < below
    found = np.bincount(drawn * min(7, below) // below, minlength=min(7, below))
    assert stats.chisquare(found).pvalue > 1e-3 if below > 1 else found[0] == 140_000


def test_no_two_streams_share_numbers_and_a_key_makes_the_same_again() -> None:
    def drawn() -> list[list[float]]:
        root = Keystream(KEY)
        streams = [root, *root.apart(3), *root.apart(2)]
        streams += streams[1].apart(2)  # of one that is apart, too
        return [stream.normal(100).tolist() for stream in streams]

    made = drawn()
    assert len({number for each in made for number in each}) == 800
    assert made == drawn()
    assert Keystream(KEY[::-1]).normal(100).tolist() != made[0]


def test_a_call_goes_on_where_the_last_one_ended() -> None:
    stream = Keystream(KEY)
    whole = [stream.normal(8).tolist() for _ in range(3)]
    assert len({number for each in whole for number in each}) == 24
    with pytest.raises(ValueError, match="at most"):
        stream.normal(PIECE + 1)
