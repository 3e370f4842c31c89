"""The server's half of a masked sum: it adds what it cannot read, and opens the sum with the members' shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, islice

import numpy as np
import numpy.typing as npt

from fedstrata.privacy import shamir
from fedstrata.privacy.fixed_point import Words
from fedstrata.privacy.masked_sums import is_open, signed_entry, signed_survivors
from fedstrata.privacy.masks import add_mask
from fedstrata.privacy.roster import Roster, decode_entry, public_key
from fedstrata.privacy.shamir import SECRET_BYTES, SHARE_BYTES
from fedstrata.privacy.sum_terms import (
    LEAST,
    SIGNATURE_BYTES,
    Group,
    Message,
    Signer,
    digest,
    message_fields,
    named,
    pieces,
    share_bytes,
    threshold,
)
from fedstrata.wire.codec import WireError

TRIES = 200
"""Choices of shares that are tried where some are wrong."""


@dataclass
class Opening:
    """One attempt at a sum, at the server. Every method of an answer refuses what a member cannot have meant.

    Attributes:
        session: digest of run, round and attempt.
        signer: knows the members' registered keys.
        begun: two members -> digest of what both began their training with.
        entries: member -> its signed keys.
        proofs: member -> the signature.
        sealed: sender -> receiver -> shares.
        commitments: member -> digest of the seed of its mask in each of its groups.
        sums: group -> the sum of what has arrived, behind masks.
        arrived: whose numbers have.
        signatures: survivor -> its signature under the list of all.
        shares: member -> the shares that it has revealed.
        fitting: whose shares gave the last secret, as places; those of one who spoils his are thus tried once, and
            not again for every secret.
    """

    session: bytes
    signer: Signer
    begun: Callable[[str, str], bytes]
    entries: dict[str, bytes] = field(default_factory=dict)
    proofs: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commitments: dict[str, list[bytes]] = field(default_factory=dict)
    sums: dict[int, Words] = field(default_factory=dict)
    arrived: list[str] = field(default_factory=list)
    signatures: dict[str, bytes] = field(default_factory=dict)
    shares: dict[str, list[bytes]] = field(default_factory=dict)
    fitting: list[list[int]] = field(default_factory=list, init=False)
    roster: Roster = field(init=False)

    @property
    def threshold(self) -> int:
        """Members that must be left at the end."""
        return threshold(len(self.entries))

    @property
    def members(self) -> list[str]:
        """Who has sent shares, in order."""
        return [name for name in self.entries if name in self.sealed]

    def check_keys(self, answer: Mapping[str, bytes]) -> None:
        """Refuse keys at which every other member would stop, so that whose they are is missing and not they.

        Raises:
            WireError: see :meth:`fedstrata.privacy.roster.Entry.check`.
        """
        entry, _ = message_fields(answer, "keys", "signature")
        decode_entry(entry).check([decode_entry(other) for other in self.entries.values()])

    def take_keys(self, name: str, answer: Mapping[str, bytes], weight: int) -> None:
        """A member's keys, and the weight for which it counts: behind masks nobody sees with which it multiplies.

        Raises:
            WireError: it means another weight, or what it sends are no keys.
        """
        entry, proof = message_fields(answer, "keys", "signature")
        if (said := decode_entry(entry).weight) != weight:
            raise WireError(f"weight: is {said}, and it counts for {weight}")
        self.signer.check(name, signed_entry(self.session, name, entry), proof)
        pieces(proof, [SIGNATURE_BYTES], "signature")
        self.entries[name], self.proofs[name] = entry, proof

    def close_roster(self, groups: tuple[Group, ...]) -> Message:
        """All have sent their keys who will: the question of step ``shares``.

        Raises:
            WireError: they are too few.
        """
        if len(self.entries) < LEAST:
            raise WireError(f"masked sum: of {len(self.entries)} clients; expected {LEAST} or more")
        entries = {name: decode_entry(entry) for name, entry in self.entries.items()}
        self.roster = Roster(self.session, entries, groups)
        names = list(self.entries)
        return {
            "names": named(names),
            "keys": b"".join(self.entries[name] for name in names),
            "signatures": b"".join(self.proofs[name] for name in names),
        }

    def take_shares(self, name: str, answer: Mapping[str, bytes]) -> None:
        """A member's shares for the others, which the server cannot read."""
        sealed, commitments = message_fields(answer, "shares", "commitments")
        groups, others = len(self.roster.own_groups(name)), [n for n in self.entries if n != name]
        each = pieces(sealed, [share_bytes(groups)] * len(others), "shares")
        self.commitments[name] = pieces(commitments, [SECRET_BYTES] * groups, "commitments")
        self.sealed[name] = dict(zip(others, each, strict=True))

    def train_question(self, name: str) -> Message:
        """The question of step ``train`` for a member."""
        members = self.members
        shares = b"".join(self.sealed[other][name] for other in members if other != name)
        return {"members": named(members), "shares": shares}

    def take_masked(self, name: str, numbers: Mapping[int, Sequence[npt.NDArray[np.uint8]]]) -> None:
        """A member's numbers behind masks, packed, group -> its parts; nothing of them can be read here."""
        for group, parts in numbers.items():
            if group not in self.sums:
                length = sum(len(content) for content in parts) // self.roster.fixed.width
                self.sums[group] = np.zeros(length, np.uint64)
            start = 0
            for content in parts:
                words = self.roster.fixed.unpack(content)
                self.sums[group][start : start + len(words)] += words
                start += len(words)
        self.arrived.append(name)

    @property
    def survivors(self) -> list[str]:
        """Whose numbers have arrived, in order."""
        known = set(self.arrived)
        return [name for name in self.entries if name in known]

    def take_signature(self, name: str, answer: Mapping[str, bytes]) -> None:
        """A survivor's signature under the list of all."""
        [signature] = message_fields(answer, "signature")
        self.signer.check(name, signed_survivors(self.roster, self.members, self.survivors), signature)
        pieces(signature, [SIGNATURE_BYTES], "signature")
        self.signatures[name] = signature

    def open_question(self) -> Message:
        """The question of step ``open``."""
        signers = [name for name in self.survivors if name in self.signatures]
        return {"signers": named(signers), "signatures": b"".join(self.signatures[name] for name in signers)}

    def take_opened(self, name: str, answer: Mapping[str, bytes]) -> None:
        """The shares that a member reveals."""
        [content] = message_fields(answer, "shares")
        self.shares[name] = pieces(content, [SHARE_BYTES] * len(self._wanted()), "shares")

    def _wanted(self) -> list[tuple[str, int]]:
        """(member, group) of the secrets that are to be known, in the order of their shares; -1 for the key."""
        survivors, wanted = self.survivors, []
        for name in self.members:
            if name not in survivors:
                wanted.append((name, -1))
                continue
            own = self.roster.own_groups(name)
            wanted += [(name, group) for group in own if is_open(self.roster.groups[group], survivors)]
        return wanted

    def result(self) -> dict[int, tuple[Words, tuple[str, ...]]]:
        """Group -> the sum of its integers modulo ``2 ** 64``, and whose it is; of enough survivors.

        Raises:
            WireError: the shares are too few, or do not fit what was announced.
        """
        if (left := len(self.shares)) < self.threshold:
            raise WireError(
                f"masked sum: the shares of {left} clients do not fit together, so it cannot be opened; expected "
                f"those of {self.threshold} of the {len(self.entries)} that began"
            )
        known = {
            (name, group): self._secret(place, name, group) for place, (name, group) in enumerate(self._wanted())
        }
        survivors, opened = self.survivors, {}
        for place, group in enumerate(self.roster.groups):
            if is_open(group, survivors):
                there = group.among(survivors)
                words = self.sums[place].copy()
                self._unmask(words, place, there, known)
                opened[place] = (words, there)
        return opened

    def _unmask(
        self, words: Words, place: int, there: Sequence[str], known: Mapping[tuple[str, int], bytes]
    ) -> None:
        """Take away the survivors' own masks, and those that they had with members who dropped out."""
        roster = self.roster
        for name in there:
            add_mask(words, roster.own_mask_key(name, known[name, place], place), roster.fixed, -1)
        for name in roster.groups[place].among(self.members):
            for other in there if name not in there else ():
                key, sign = roster.mask_key(name, known[name, -1], other, place, self.begun(name, other))
                add_mask(words, key, roster.fixed, sign)  # the survivor's had the other sign

    def _secret(self, place: int, name: str, group: int) -> bytes:
        """A member's secret, from shares that together give what it had announced."""
        names = list(self.entries)
        shares = {1 + names.index(giver): given[place] for giver, given in self.shares.items()}
        for chosen in chain(self.fitting, _choices(sorted(shares), self.threshold)):
            places = list(chosen)
            try:
                secret = shamir.join({x: shares[x] for x in places})
            except ValueError:
                continue
            if self._fits(secret, name, group):
                self.fitting = [places]
                return secret
        raise WireError(f"masked sum: the shares of {name}'s secrets do not fit together, so it cannot be opened")

    def _fits(self, secret: bytes, name: str, group: int) -> bool:
        if group < 0:
            return public_key(secret) == self.roster.entries[name].mask
        return digest(b"seed", secret) == self.commitments[name][self.roster.own_groups(name).index(group)]


def _choices(places: Sequence[int], count: int) -> Iterator[Iterable[int]]:
    """Choices of so many places, of which at most :data:`TRIES` are worth trying: neighbors first."""
    around = [*places, *places]
    if len(places) >= count:
        yield from (around[i : i + count] for i in range(len(places)))
        yield from islice(combinations(places, count), TRIES)
