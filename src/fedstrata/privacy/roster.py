"""The public keys and weights of a sum's members, and the keys that follow from them between two of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedstrata.privacy.fixed_point import MOST_WEIGHT, FixedPoint, fixed_point
from fedstrata.privacy.masks import derive
from fedstrata.privacy.shamir import SECRET_BYTES
from fedstrata.privacy.sum_terms import ENTRY_BYTES, Group, digest, named
from fedstrata.wire.codec import WireError


@dataclass(frozen=True)
class Entry:
    """What a member says of itself.

    Attributes:
        box: public key for what other members send it.
        mask: public key for its masks, the private half of which is shared among the others.
        weight: its weight in the mean.
    """

    box: bytes
    mask: bytes
    weight: int

    def encode(self) -> bytes:
        """As it travels and is signed, ``ENTRY_BYTES``."""
        return self.box + self.mask + self.weight.to_bytes(8, "big")

    def check(self, others: Collection[Entry]) -> None:
        """Refuse keys with which no member goes on.

        Raises:
            WireError: the two are one, another member has one of them, or with one there is no secret.
        """
        if len({self.box, self.mask}.difference(*((each.box, each.mask) for each in others))) < 2:
            raise WireError("keys: one is there twice")
        for key in (self.box, self.mask):
            agreed(bytes(SECRET_BYTES), key)


def decode_entry(content: bytes) -> Entry:
    """An entry as it came.

    Raises:
        WireError: it is none, or its weight is out of bounds.
    """
    if len(content) != ENTRY_BYTES:
        raise WireError(f"keys: have {len(content)} bytes, expected {ENTRY_BYTES}")
    box, mask = content[:SECRET_BYTES], content[SECRET_BYTES : 2 * SECRET_BYTES]
    weight = int.from_bytes(content[2 * SECRET_BYTES :], "big")
    if not 1 <= weight <= MOST_WEIGHT:
        raise WireError(f"weight: is {weight}; expected 1 to {MOST_WEIGHT}")
    return Entry(box, mask, weight)


@dataclass(frozen=True)
class Roster:
    """The members of a sum.

    Attributes:
        session: digest of run, round and attempt.
        entries: member -> its entry, in canonical order.
        groups: the sums of the round.
    """

    session: bytes
    entries: Mapping[str, Entry]
    groups: tuple[Group, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The members."""
        return tuple(self.entries)

    @property
    def fixed(self) -> FixedPoint:
        """How numbers are integers in this sum."""
        return fixed_point(sum(entry.weight for entry in self.entries.values()))

    def own_groups(self, name: str) -> list[int]:
        """Places of the groups that a member sends."""
        return [i for i, group in enumerate(self.groups) if name in group.senders]

    def total(self, names: Sequence[str]) -> int:
        """The weights of some members together."""
        return sum(self.entries[name].weight for name in names)

    def digest(self) -> bytes:
        """What every signature of this sum is bound to."""
        said = [part for name, entry in self.entries.items() for part in (name.encode(), entry.encode())]
        for group in self.groups:
            said += [named(group.parts), named(group.senders), group.least.to_bytes(2, "big")]
        return digest(b"fedstrata sum", self.session, *said)

    def mask_key(self, own: str, secret: bytes, other: str, group: int, begun: bytes) -> tuple[bytes, int]:
        """The key of the mask between two members in a group, and the sign with which ``own`` adds it.

        Args:
            own: the one.
            secret: its private key.
            other: the other.
            group: place of the group.
            begun: digest of what both began their training with: of others the masks do not cancel.
        """
        pair = sorted((own, other), key=self.names.index)
        use = digest(b"mask", self.digest(), pair[0].encode(), pair[1].encode(), bytes([group]), begun)
        return derive(agreed(secret, self.entries[other].mask), use), 1 if pair[0] == own else -1

    def own_mask_key(self, name: str, seed: bytes, group: int) -> bytes:
        """The key of a member's own mask in a group."""
        return derive(seed, digest(b"own mask", self.digest(), name.encode(), bytes([group])))

    def box_key(self, sender: str, receiver: str, secret: bytes, public: bytes) -> bytes:
        """The key for what one member sends another."""
        use = digest(b"box", self.digest(), sender.encode(), receiver.encode())
        return derive(agreed(secret, public), use)


def public_key(secret: bytes) -> bytes:
    """The public half of a private X25519 key."""
    return bytes(X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw())


def agreed(secret: bytes, public: bytes) -> bytes:
    """The secret that two X25519 keys have in common.

    Raises:
        WireError: the public key is one with which there is no secret.
    """
    try:
        private = X25519PrivateKey.from_private_bytes(secret)
        return bytes(private.exchange(X25519PublicKey.from_public_bytes(public)))
    except ValueError:
        raise WireError("keys: one is a point of low order") from None
