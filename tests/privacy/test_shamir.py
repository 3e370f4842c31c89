from __future__ import annotations

import itertools
import secrets
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.privacy import shamir
from fedstrata.privacy.shamir import PRIME, join, split


def test_the_modulus_is_prime_and_no_smaller_one_holds_32_bytes() -> None:
    def passes(n: int, base: int) -> bool:  # Miller and Rabin
        d, r = n - 1, 0
        while d % 2 == 0:
            d, r = d // 2, r + 1
        x = pow(base, d, n)
        return x in (1, n - 1) or any((x := x * x % n) == n - 1 for _ in range(r - 1))

    assert all(passes(PRIME, base) for base in range(2, 60))
    assert PRIME > 1 << 256
    assert not any(all(passes(n, base) for base in (2, 3, 5, 7)) for n in range((1 << 256) + 1, PRIME, 2))


def test_shares_are_the_values_of_a_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """f(x) = 2 x**2 + 5 x + 7 by hand, and f(x) = -x + 7 modulo the prime."""
    secret = (7).to_bytes(32, "big")
    drawn = iter([2, 5, PRIME - 1])
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda most: next(drawn))
    assert [int.from_bytes(share, "big") for share in split(secret, 3, 4)] == [14, 25, 40, 59]
    assert [int.from_bytes(share, "big") for share in split(secret, 2, 8)] == [6, 5, 4, 3, 2, 1, 0, PRIME - 1]


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(split(secret, 3, 5), 1))
    for chosen in itertools.combinations(shares, 3):
        assert join({x: shares[x] for x in chosen}) == secret
    assert join(shares) == secret
    for chosen in itertools.combinations(shares, 2):
        with suppress(ValueError):
            assert join({x: shares[x] for x in chosen}) != secret


def test_two_shares_of_three_fit_every_secret() -> None:
    """For each possible third value there is one secret: two shares alone say nothing."""
    shares = dict(enumerate(split(bytes(32), 3, 5), 1))
    seen = set()
    for third in range(200):
        try:
            seen.add(join({1: shares[1], 2: shares[2], 3: third.to_bytes(33, "big")}))
        except ValueError:  # the 297 values that no secret has
            seen.add(third)
    assert len(seen) == 200


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 6), st.randoms())
@settings(max_examples=50)
def test_split_and_join(secret: bytes, threshold: int, more: int, random: object) -> None:
    shares = list(enumerate(split(secret, threshold, threshold + more), 1))
    random.shuffle(shares)  # type: ignore[attr-defined]
    assert join(dict(shares[:threshold])) == secret


@pytest.mark.parametrize("shares", [{}, {0: bytes(33)}, {1: b"\xff" * 33}])
def test_what_is_no_share_is_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(ValueError, match="no shares"):
        join(shares)


@pytest.mark.parametrize(("size", "threshold", "count"), [(31, 2, 3), (33, 2, 3), (32, 0, 3), (32, 4, 3)])
def test_what_cannot_be_split_is_refused(size: int, threshold: int, count: int) -> None:
    with pytest.raises(ValueError, match="bytes among"):
        split(bytes(size), threshold, count)
