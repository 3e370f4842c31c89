"""A member's half of a masked sum: the server learns the sum of what at least ``threshold`` members bring, and not
what any one of them does (Bonawitz et al. 2017, Practical Secure Aggregation, the variant for active adversaries).

    step        the server                         a member
    keys        names run, round and attempt       two public keys and its weight, signed
    shares      everybody's keys                   shares of its secrets, sealed for each of the others
    train       the shares for this member         its numbers behind masks
    survivors   whose numbers have arrived         its signature under that list
    open        signatures of ``threshold``        for a survivor the shares of its own mask, for who dropped out
                                                   those of its key; never both

Masks between two members cancel in the sum, if both began their training alike: a server that sends the model to
one and to the others what learns nothing would else open that one's numbers (Pasquini et al. 2022, Eluding Secure
Aggregation). The own mask keeps numbers hidden that arrive after the server has had their pair masks opened. A
member answers each step once; the same question gets the same answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedstrata.privacy import shamir
from fedstrata.privacy.fixed_point import Integers, Words
from fedstrata.privacy.masks import add_mask
from fedstrata.privacy.roster import Entry, Roster, decode_entry, public_key
from fedstrata.privacy.shamir import SECRET_BYTES, SHARE_BYTES
from fedstrata.privacy.sum_secrets import Secrets
from fedstrata.privacy.sum_terms import (
    ENTRY_BYTES,
    LEAST,
    MOST,
    SIGNATURE_BYTES,
    Group,
    Message,
    Signer,
    digest,
    json_of,
    message_fields,
    named,
    names_in,
    pieces,
    share_bytes,
    threshold,
)
from fedstrata.wire.codec import WireError

NONCE = bytes(12)
"""A key seals one message and no more."""
NO_SHARE = b"\xff" * SHARE_BYTES
"""In place of a share that could not be unsealed; it is no number below the prime."""
GroupsOf = Callable[[tuple[str, ...]], tuple[Group, ...]]
"""Members -> the sums of the round: every member knows every other's plan."""


@dataclass
class Member:
    """One member of one attempt at a sum.

    Attributes:
        name: its name.
        session: digest of run, round and attempt.
        signer: signs for it and knows the others' registered keys.
        groups_of: the sums of the round among given members.
        secrets: what it keeps.
        begun: another member -> digest of what both began their training with, as far as this one was sent it.
    """

    name: str
    session: bytes
    signer: Signer
    groups_of: GroupsOf
    secrets: Secrets
    begun: Callable[[str], bytes]

    def answer(self, step: str, question: Mapping[str, bytes]) -> Message:
        """The answer to a step without numbers; to the same question the same.

        Raises:
            WireError: it is not the time for it, it is not what an honest server asks, or it is the second
                question of this step.
        """
        known = self.asked(step, question)
        if known is not None:
            return known
        steps = {"keys": self._keys, "shares": self._shares, "survivors": self._survivors, "open": self._open}
        answer = steps[step](question)
        self.secrets.answers[step][1] = {name: content.hex() for name, content in answer.items()}
        return answer

    def asked(self, step: str, question: Mapping[str, bytes]) -> Message | None:
        """Take note of a question; the answer that it had before, if it is the same one.

        Raises:
            WireError: another was asked before.
        """
        parts = [part for name in sorted(question) for part in (name.encode(), question[name])]
        asked = digest(*parts).hex()
        before = self.secrets.answers.get(step)
        if before is None:
            self.secrets.answers[step] = [asked, None]
            return None
        if before[0] != asked:
            raise WireError(f"masked sum: it is asked a second time for {step!r}, with another question")
        return None if before[1] is None else {k: bytes.fromhex(v) for k, v in before[1].items()}

    def roster(self) -> Roster:
        """The members, as this one was told.

        Raises:
            WireError: it has not been told.
        """
        entries = {name: decode_entry(bytes.fromhex(said)) for name, said in self.secrets.roster.items()}
        if not entries:
            raise WireError("masked sum: the members' keys have not been sent")
        return Roster(self.session, entries, self.groups_of(tuple(entries)))

    def sends_with_all(self, names: Sequence[str]) -> bool:
        """Whether each part that it sends is sent by all of these members, so that who opens its sum is in it.

        A member opens one sum of a round. So where this holds, no difference of such sums is a single member's:
        more than two thirds of each would have to be in others that they do not open.
        """
        groups = [group.senders for group in self.groups_of(tuple(names))]
        return all(len(senders) == len(names) for senders in groups if self.name in senders)

    def _entry(self) -> Entry:
        box, mask = bytes.fromhex(self.secrets.box), bytes.fromhex(self.secrets.mask)
        return Entry(public_key(box), public_key(mask), self.secrets.weight)

    def _keys(self, question: Mapping[str, bytes]) -> Message:
        entry = self._entry().encode()
        return {"keys": entry, "signature": self.signer.sign(signed_entry(self.session, self.name, entry))}

    def _shares(self, question: Mapping[str, bytes]) -> Message:
        content, keys, signatures = message_fields(question, "names", "keys", "signatures")
        self._take_roster(content, keys, signatures)
        roster = self.roster()
        own, count = roster.own_groups(self.name), len(roster.names)
        seeds = [secrets.token_bytes(SECRET_BYTES) for _ in own]
        self.secrets.seeds = {str(group): seed.hex() for group, seed in zip(own, seeds, strict=True)}
        all_secrets = [bytes.fromhex(self.secrets.mask), *seeds]
        shared = [shamir.split(secret, threshold(count), count) for secret in all_secrets]
        sealed = []
        for place, other in enumerate(roster.names):
            content = b"".join(shares[place] for shares in shared)
            if other == self.name:
                self.secrets.own_shares = [shares[place].hex() for shares in shared]
            else:
                box = bytes.fromhex(self.secrets.box)
                key = roster.box_key(self.name, other, box, roster.entries[other].box)
                sealed.append(ChaCha20Poly1305(key).encrypt(NONCE, content, None))
        return {"shares": b"".join(sealed), "commitments": b"".join(digest(b"seed", seed) for seed in seeds)}

    def _take_roster(self, content: bytes, keys: bytes, signatures: bytes) -> None:
        """Believe in the members' keys where each is signed by who is registered under the name."""
        names = json_of(content, "names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise WireError("names: are no names")
        if not LEAST <= len(names) <= MOST or len(set(names)) < len(names):
            raise WireError(
                f"masked sum: has {len(set(names))} different members; expected {LEAST} to {MOST}, each once"
            )
        entries = pieces(keys, [ENTRY_BYTES] * len(names), "keys")
        proofs = pieces(signatures, [SIGNATURE_BYTES] * len(names), "signatures")
        if self.name not in names or entries[names.index(self.name)] != self._entry().encode():
            raise WireError("masked sum: its own keys are not among those of the members")
        for name, entry, proof in zip(names, entries, proofs, strict=True):
            if name != self.name:
                self.signer.check(name, signed_entry(self.session, name, entry), proof)
        decoded = [decode_entry(entry) for entry in entries]
        if len({key for entry in decoded for key in (entry.box, entry.mask)}) < 2 * len(decoded):
            raise WireError("masked sum: two members have the same key")
        self.secrets.roster = {name: entry.hex() for name, entry in zip(names, entries, strict=True)}

    def masked(self, question: Mapping[str, bytes], numbers: Mapping[int, Integers]) -> dict[int, Words]:
        """Its numbers behind masks; call :meth:`asked` before they are made, and refuse if it has an answer.

        Args:
            question: the message of step ``train``.
            numbers: group -> its integers, weighted by nothing yet.
        """
        roster = self.roster()
        content, sealed = message_fields(question, "members", "shares")
        members = names_in(content, roster.names, "members")
        self._need(members, len(roster.names))
        others = [name for name in members if name != self.name]
        sizes = [share_bytes(len(roster.own_groups(name))) for name in others]
        self.secrets.members = list(members)
        self.secrets.sealed = {
            name: piece.hex() for name, piece in zip(others, pieces(sealed, sizes, "shares"), strict=True)
        }
        fixed, secret, result = roster.fixed, bytes.fromhex(self.secrets.mask), {}
        for group, own in numbers.items():
            words = fixed.weighted(own, self.secrets.weight)
            seed = bytes.fromhex(self.secrets.seeds[str(group)])
            add_mask(words, roster.own_mask_key(self.name, seed, group), fixed)
            for other in roster.groups[group].among(others):
                key, sign = roster.mask_key(self.name, secret, other, group, self.begun(other))
                add_mask(words, key, fixed, sign)
            result[group] = words
        self.secrets.answers["train"][1] = {}
        return result

    def _need(self, names: tuple[str, ...], count: int) -> None:
        if self.name not in names:
            raise WireError("masked sum: it is not among its members")
        if len(names) < threshold(count):
            raise WireError(
                f"masked sum: {len(names)} of {count} members are too few; expected {threshold(count)} or more"
            )

    def _survivors(self, question: Mapping[str, bytes]) -> Message:
        [content] = message_fields(question, "survivors")
        if not self.secrets.members or self.secrets.answers.get("train", [None, None])[1] is None:
            raise WireError("masked sum: its own numbers have not been asked for")
        survivors = names_in(content, self.secrets.members, "survivors")
        roster = self.roster()
        self._need(survivors, len(roster.names))
        self.secrets.survivors = list(survivors)
        content = signed_survivors(roster, self.secrets.members, survivors)
        return {"signature": self.signer.sign(content)}

    def _open(self, question: Mapping[str, bytes]) -> Message:
        content, signatures = message_fields(question, "signers", "signatures")
        survivors = self.secrets.survivors
        if not survivors:
            raise WireError("masked sum: the survivors have not been said")
        roster = self.roster()
        signers = names_in(content, survivors, "signers")
        if len(signers) < threshold(len(roster.names)):
            raise WireError(f"masked sum: {len(signers)} signatures under the survivors are too few")
        proofs = pieces(signatures, [SIGNATURE_BYTES] * len(signers), "signatures")
        content = signed_survivors(roster, self.secrets.members, survivors)
        for name, proof in zip(signers, proofs, strict=True):
            if name != self.name:
                self.signer.check(name, content, proof)
        shares = []
        for name in self.secrets.members:
            own = self._shares_of(roster, name)
            if name not in survivors:
                shares.append(own[0])
                continue
            for place, group in enumerate(roster.own_groups(name)):
                if is_open(roster.groups[group], survivors):
                    shares.append(own[1 + place])
        return {"shares": b"".join(shares)}

    def _shares_of(self, roster: Roster, name: str) -> list[bytes]:
        """The shares that it has of a member's secrets: of the private key, then by group."""
        if name == self.name:
            return [bytes.fromhex(share) for share in self.secrets.own_shares]
        box = bytes.fromhex(self.secrets.box)
        key = roster.box_key(name, self.name, box, roster.entries[name].box)
        count = 1 + len(roster.own_groups(name))
        try:
            content = ChaCha20Poly1305(key).decrypt(NONCE, bytes.fromhex(self.secrets.sealed[name]), None)
        except InvalidTag:  # its sender or the server has spoiled it; others may have theirs
            return [NO_SHARE] * count
        return pieces(content, [SHARE_BYTES] * count, "shares")


def signed_entry(session: bytes, name: str, entry: bytes) -> bytes:
    """What a member signs of its keys."""
    return digest(b"fedstrata keys", session, name.encode(), entry)


def signed_survivors(roster: Roster, members: Sequence[str], survivors: Sequence[str]) -> bytes:
    """What a survivor signs."""
    return digest(b"fedstrata survivors", roster.digest(), named(members), named(survivors))


def is_open(group: Group, survivors: Sequence[str]) -> bool:
    """Whether enough survivors are in a group's sum for it to be opened."""
    return len(group.among(survivors)) >= group.least
