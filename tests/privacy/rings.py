"""A masked sum played in memory: members, a server, and whoever drops out between two steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from fedstrata.privacy.masked_sums import GroupsOf, Member
from fedstrata.privacy.opening import Opening
from fedstrata.privacy.sum_secrets import load_secrets, new_secrets
from fedstrata.privacy.sum_terms import Signer, Unsigned, groups_of

SESSION = b"session"
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def groups_by(sends: Mapping[str, Sequence[str]]) -> GroupsOf:
    return lambda names: groups_of({name: sends[name] for name in names})


def alike(one: str, other: str) -> bytes:
    """Of each two members something of their own."""
    return "+".join(sorted((one, other))).encode()


def members_of(
    sends: Mapping[str, Sequence[str]],
    weights: Mapping[str, int],
    signer: Callable[[str], Signer] = lambda name: Unsigned(),
    begun: Callable[[str, str], bytes] = alike,
) -> dict[str, Member]:
    return {
        name: Member(
            name, SESSION, signer(name), groups_by(sends), new_secrets(weights[name]), partial(begun, name)
        )
        for name in sends
    }


def again(member: Member) -> Member:
    """The member after its program has ended and started again."""
    return Member(
        member.name,
        member.session,
        member.signer,
        member.groups_of,
        load_secrets(member.secrets.dump()),
        member.begun,
    )


class Ring:
    """Plays the steps. ``drops`` says who is there no more from which step on."""

    def __init__(self, members: Mapping[str, Member], drops: Mapping[str, Collection[str]] = {}) -> None:
        self.members = dict(members)
        self.drops = drops
        self.gone: set[str] = set()
        first = next(iter(self.members.values()))
        self.server = Opening(SESSION, first.signer, alike)
        self.groups_of = first.groups_of

    def there(self, step: str, names: Sequence[str]) -> list[str]:
        self.gone |= set(self.drops.get(step, ()))
        for name in names:
            self.members[name] = again(self.members[name])
        return [name for name in names if name not in self.gone]

    def until_train(self) -> None:
        server = self.server
        for name in self.there("keys", list(self.members)):
            server.take_keys(name, self.members[name].answer("keys", {}), self.members[name].secrets.weight)
        question = server.close_roster(self.groups_of(tuple(server.entries)))
        for name in self.there("shares", list(server.entries)):
            server.take_shares(name, self.members[name].answer("shares", question))

    def train(self, numbers: Mapping[str, Mapping[str, Ints]]) -> None:
        server = self.server
        for name in self.there("train", server.members):
            member, question = self.members[name], server.train_question(name)
            assert member.asked("train", question) is None
            groups = server.roster.groups
            own = {
                g: np.concatenate([numbers[name][part] for part in groups[g].parts])
                for g in server.roster.own_groups(name)
            }
            masked = member.masked(question, own)
            server.take_masked(name, {g: [server.roster.fixed.pack(words)] for g, words in masked.items()})

    def until_open(self) -> None:
        server = self.server
        for name in self.there("survivors", server.survivors):
            server.take_signature(name, self.members[name].answer("survivors", self.survivors()))
        for name in self.there("open", server.survivors):
            server.take_opened(name, self.members[name].answer("open", server.open_question()))

    def survivors(self) -> dict[str, bytes]:
        from fedstrata.privacy.sum_terms import named

        return {"survivors": named(self.server.survivors)}

    def result(self) -> dict[str, tuple[list[int], tuple[str, ...]]]:
        """Part group -> its sum as integers, and whose."""
        groups, fixed = self.server.roster.groups, self.server.roster.fixed
        return {
            "+".join(groups[g].parts): (fixed.signed(words).tolist(), names)
            for g, (words, names) in self.server.result().items()
        }
