"""What members of a masked sum and the server agree on: who is in it, which parts, the sizes of messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedstrata.privacy.shamir import SECRET_BYTES, SHARE_BYTES
from fedstrata.wire.codec import WireError
from fedstrata.wire.foreign import read_json

LEAST = 3
"""Fewest clients whose sum is opened: of two each would know the other."""
MOST = 256
"""Most clients in a sum: the work of each grows with their number, that of the server with its square."""
SIGNATURE_BYTES = 132
"""Of ECDSA over the largest curve, as two numbers; shorter ones are filled with zeros."""
ENTRY_BYTES = 2 * SECRET_BYTES + 8
"""Two public keys and a weight."""
MOST_NAMES = 1 << 17
"""Characters of the names of all members, at most."""
ATTEMPT_BYTES = 16
"""Of the random name that the server gives to an attempt at a sum."""
TAG_BYTES = 16
"""Of ChaCha20-Poly1305."""

Message = dict[str, bytes]
"""What a member and the server send each other in one step, by name."""


class Signer(Protocol):
    """Signs for one member and knows the registered keys of the others."""

    def sign(self, content: bytes) -> bytes:
        """A signature, ``SIGNATURE_BYTES``."""

    def check(self, name: str, content: bytes, signature: bytes) -> None:
        """Check a member's signature.

        Raises:
            WireError: it is not that of the key which is registered under this name, or there is none.
        """


class Unsigned:
    """In one process everything is played by one program: nothing is signed, and nothing would be proved by it."""

    def sign(self, content: bytes) -> bytes:
        """Zeros, as many as a signature has."""
        return bytes(SIGNATURE_BYTES)

    def check(self, name: str, content: bytes, signature: bytes) -> None:
        """Nothing to check."""


@dataclass(frozen=True)
class Group:
    """Parts that the same members send, and that are therefore one sum.

    Attributes:
        parts: their names, in the model's order.
        senders: the members who send them, in canonical order.
        least: fewest of them whose sum is opened.
    """

    parts: tuple[str, ...]
    senders: tuple[str, ...]
    least: int = LEAST

    def among(self, members: Iterable[str]) -> tuple[str, ...]:
        """Those of the senders who are among ``members``."""
        known = set(members)
        return tuple(name for name in self.senders if name in known)


def groups_of(sends: Mapping[str, Sequence[str]], least: int = LEAST) -> tuple[Group, ...]:
    """The sums of a round.

    Args:
        sends: member -> the parts that it sends, in the model's order; members in canonical order.
        least: fewest members whose sum is opened.
    """
    senders: dict[str, list[str]] = {}
    for name, parts in sends.items():
        for part in parts:
            senders.setdefault(part, []).append(name)
    alike: dict[tuple[str, ...], list[str]] = {}
    for part, names in senders.items():
        alike.setdefault(tuple(names), []).append(part)
    return tuple(Group(tuple(parts), names, least) for names, parts in alike.items())


def threshold(members: int) -> int:
    """Members who have to take part in opening a sum (Bonawitz et al. 2017, section 6.2, active adversaries)."""
    return 2 * members // 3 + 1


def only_one_opens(one: Collection[Any], other: Collection[Any], honest: int) -> bool:
    """Whether honest members open one sum at most, where a server asks two lists of clients for the same round.

    An honest one opens one sum of a round. So who would open both is colluding: fewer than a third of either list,
    and none of those on whose noise it relies.

    Args:
        one: a list, each client once.
        other: the other.
        honest: so many of either add their noise.
    """
    would = threshold(len(one)) + threshold(len(other)) - len({*one, *other})
    fewer = min(len(one), len(other))
    return would > min((fewer - 1) // 3, fewer - honest)


def share_bytes(groups: int) -> int:
    """Bytes of one member's shares for another, under way, of one that sends so many groups."""
    return (1 + groups) * SHARE_BYTES + TAG_BYTES


def named(names: Sequence[str]) -> bytes:
    """Names as they travel."""
    return json.dumps(list(names), ensure_ascii=False).encode()


def json_of(content: bytes, what: str) -> Any:
    """What a message holds that must be names.

    Raises:
        WireError: it is no JSON.
    """
    try:
        return read_json(content, MOST_NAMES)
    except ValueError:
        raise WireError(f"{what}: are no names") from None


def names_in(content: bytes, among: Iterable[str], what: str) -> tuple[str, ...]:
    """The names of a message, which must be some of ``among``, in their order.

    Raises:
        WireError: they are not.
    """
    order, names = list(among), json_of(content, what)
    known = set(order)
    if not isinstance(names, list) or not all(isinstance(name, str) and name in known for name in names):
        raise WireError(f"{what}: names somebody who is not in this sum")
    chosen = set(names)
    if names != [name for name in order if name in chosen]:
        raise WireError(f"{what}: names somebody twice, or not in order")
    return tuple(names)


def pieces(content: bytes, sizes: Sequence[int], what: str) -> list[bytes]:
    """A message's content cut into pieces of these sizes.

    Raises:
        WireError: it has another length.
    """
    if len(content) != sum(sizes):
        raise WireError(f"{what}: has {len(content)} bytes, expected {sum(sizes)}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [content[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def message_fields(message: Mapping[str, bytes], *names: str) -> list[bytes]:
    """The fields of a message, which must have these and no others.

    Raises:
        WireError: it has not.
    """
    if message.keys() != set(names):
        raise WireError(f"masked sum: found the fields {sorted(message)}, expected {sorted(names)}")
    return [message[name] for name in names]


def digest(*contents: bytes) -> bytes:
    """One digest of several contents, which tells where each ends."""
    hashed = hashlib.sha256()
    for content in contents:
        hashed.update(len(content).to_bytes(8, "big") + content)
    return hashed.digest()
