"""Signatures of masked sums: no server can put itself between the sites."""

from __future__ import annotations

from pathlib import Path

import pytest
from rings import Ring, members_of

from fedstrata.client.sum_rules import session
from fedstrata.privacy.roster import Entry, Roster
from fedstrata.privacy.sum_terms import SIGNATURE_BYTES, Group, groups_of
from fedstrata.sites.provision import add_site, init
from fedstrata.sites.settings import read_site
from fedstrata.sites.signing import KeySigner, site_signer
from fedstrata.wire.codec import WireError

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeySigner]:
    folder = tmp_path_factory.mktemp("federation")
    init(folder, NAMES)
    settings = [read_site(folder / "sites" / name) for name in NAMES]
    return {own.name: site_signer(own.key, own.peers) for own in settings}


def test_a_signature_holds_for_its_name_and_content_alone(signers: dict[str, KeySigner]) -> None:
    signature = signers["a"].sign(b"content")
    assert len(signature) == SIGNATURE_BYTES
    signers["b"].check("a", b"content", signature)
    for name, content, proof in (
        ("a", b"other", signature),
        ("c", b"content", signature),
        ("a", b"content", bytes(SIGNATURE_BYTES)),
        ("a", b"content", signature[:-1] + bytes([signature[-1] ^ 1])),
        ("a", b"content", b""),
    ):
        with pytest.raises(WireError, match="is not signed with its registered key"):
            signers["b"].check(name, content, proof)
    with pytest.raises(WireError, match="the key of 'x' is not known here"):
        signers["b"].check("x", b"content", signature)


def test_a_server_that_puts_its_own_keys_in_is_found_out(signers: dict[str, KeySigner]) -> None:
    """It answers for b with keys of its own, and could then read what a seals for b."""
    sends, weights = dict.fromkeys(NAMES, ("low",)), dict.fromkeys(NAMES, 1)
    ring = Ring(members_of(sends, weights, signers.__getitem__))
    other = members_of(sends, weights, signers.__getitem__)["b"]
    server = ring.server
    for name, member in ring.members.items():
        server.take_keys(name, member.answer("keys", {}), member.secrets.weight)
    server.entries["b"] = other.answer("keys", {})["keys"]
    question = server.close_roster(groups_of(sends))
    with pytest.raises(WireError, match="what came as 'b' is not signed"):
        ring.members["a"].answer("shares", question)


def test_keys_of_another_round_are_found_out(signers: dict[str, KeySigner]) -> None:
    sends, weights = dict.fromkeys(NAMES, ("low",)), dict.fromkeys(NAMES, 1)
    ring, before = (Ring(members_of(sends, weights, signers.__getitem__)) for _ in range(2))
    before.members["b"].session = b"another session"
    for name, member in ring.members.items():
        ring.server.take_keys(name, member.answer("keys", {}), member.secrets.weight)
    with pytest.raises(WireError, match="what came as 'b' is not signed"):
        ring.server.take_keys("b", before.members["b"].answer("keys", {}), 1)


def test_a_forged_list_of_survivors_opens_nothing(signers: dict[str, KeySigner]) -> None:
    import numpy as np

    sends, weights = dict.fromkeys(NAMES, ("low",)), dict.fromkeys(NAMES, 1)
    ring = Ring(members_of(sends, weights, signers.__getitem__))
    ring.until_train()
    ring.train({name: {"low": np.zeros(3, np.int64)} for name in NAMES})
    for name in NAMES:
        ring.server.take_signature(name, ring.members[name].answer("survivors", ring.survivors()))
    question = ring.server.open_question()
    forged = {**question, "signatures": question["signatures"][:SIGNATURE_BYTES] * 4}
    with pytest.raises(WireError, match="what came as 'b' is not signed"):
        ring.members["a"].answer("open", forged)


def test_a_new_site_knows_the_others_and_they_need_its_key(tmp_path: Path) -> None:
    init(tmp_path, ["a", "b"])
    written = add_site(tmp_path, "c")
    peers = tmp_path / "sites" / "c" / "peers"
    assert sorted(path.name for path in peers.iterdir()) == ["a.pub", "b.pub", "c.pub"]
    assert {path.name for path in written} >= {"a.pub", "b.pub", "c.pub"}
    assert sorted(p.name for p in (tmp_path / "sites" / "a" / "peers").iterdir()) == ["a.pub", "b.pub"]


def test_members_who_were_told_different_jobs_take_part_in_no_sum(signers: dict[str, KeySigner]) -> None:
    """Else a server gives one of them a part that nobody else sends, and asks the others for its mask."""
    assert session(b"run", b"one job", 0, b"attempt") != session(b"run", b"another job", 0, b"attempt")
    sends, weights = dict.fromkeys(NAMES, ("low",)), dict.fromkeys(NAMES, 1)
    ring = Ring(members_of(sends, weights, signers.__getitem__))
    ring.members["a"].session = session(b"run", b"another job", 0, b"attempt")
    for name, member in ring.members.items():
        answer = member.answer("keys", {})
        ring.server.entries[name], ring.server.proofs[name] = answer["keys"], answer["signature"]
    question = ring.server.close_roster(groups_of(sends))
    for name in NAMES:
        with pytest.raises(WireError, match="is not signed with its registered key"):
            ring.members[name].answer("shares", question)


def test_a_sum_is_bound_to_its_groups() -> None:
    names = ("a", "b", "c")
    entries = {name: Entry(bytes(32), bytes(32), 1) for name in names}
    groups = [
        (Group(("low",), names),),
        (Group(("low", "high"), names),),
        (Group(("low",), names[:2]),),
        (Group(("low",), names, 4),),
    ]
    assert len({Roster(b"session", entries, own).digest() for own in groups}) == 4


def test_a_member_weighs_as_agreed(signers: dict[str, KeySigner]) -> None:
    """Behind masks nobody sees with which weight it multiplies."""
    sends, weights = dict.fromkeys(NAMES, ("low",)), dict.fromkeys(NAMES, 2**24)
    ring = Ring(members_of(sends, weights, signers.__getitem__))
    with pytest.raises(WireError, match="weight: is 16777216, and it counts for 4"):
        ring.server.take_keys("a", ring.members["a"].answer("keys", {}), 4)
    assert not ring.server.entries
