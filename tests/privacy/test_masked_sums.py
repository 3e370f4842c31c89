"""Masked sums without training: what is opened is the plain sum, whoever drops out, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from rings import Ints, Ring, again, alike, members_of

from fedstrata.privacy import shamir
from fedstrata.privacy.masked_sums import Member
from fedstrata.privacy.sum_terms import LEAST, threshold
from fedstrata.wire.codec import WireError

STEPS = ("keys", "shares", "train", "survivors", "open")
SIZES = {"low": 3, "middle": 1, "top": 2}


def drawn(sends: Mapping[str, Sequence[str]], rng: np.random.Generator) -> dict[str, dict[str, Ints]]:
    most = 1 << 26
    return {name: {p: rng.integers(-most, most, SIZES[p]) for p in parts} for name, parts in sends.items()}


def plain(
    sends: Mapping[str, Sequence[str]],
    weights: Mapping[str, int],
    numbers: Mapping[str, Mapping[str, Ints]],
    names: Sequence[str],
    parts: Sequence[str],
) -> list[int]:
    """The sum by Python's own integers, one after another."""
    return [
        sum(weights[name] * int(numbers[name][part][i]) for name in names)
        for part in parts
        for i in range(SIZES[part])
    ]


def pattern(seed: int) -> tuple[Ring, dict[str, Sequence[str]], dict[str, int], dict[str, dict[str, Ints]]]:
    """Members with parts, weights and numbers of their own, and some who drop out before some steps."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    names = [f"site {i}" for i in range(draw.randint(3, 7))]
    depth = [tuple(SIZES), ("middle", "top"), ("top",)]
    sends = {name: depth[draw.randint(0, 2)] if seed % 2 else depth[0] for name in names}
    weights = {name: draw.randint(1, 5000) for name in names}
    drops: dict[str, list[str]] = {step: [] for step in STEPS}
    for name in draw.sample(names, draw.randint(0, len(names) // 2)):
        drops[draw.choice(STEPS)].append(name)
    return Ring(members_of(sends, weights), drops), sends, weights, drawn(sends, rng)


Result = dict[str, tuple[list[int], tuple[str, ...]]]


def played(ring: Ring, numbers: Mapping[str, Mapping[str, Ints]]) -> tuple[Result, str]:
    """What is opened, or why nothing is."""
    try:
        ring.until_train()
        ring.train(numbers)
        ring.until_open()
        return ring.result(), ""
    except WireError as error:
        return {}, str(error)


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_what_is_opened_is_the_plain_sum_in_a_thousand_patterns_of_dropping_out(first: int) -> None:
    opened = 0
    for seed in range(first, first + 100):
        ring, sends, weights, numbers = pattern(seed)
        result, refused = played(ring, numbers)
        if refused:
            assert "few" in refused or "fit together" in refused or "of 2 clients" in refused
            server = ring.server
            left = min(len(server.entries), len(server.shares))
            assert left < max(LEAST, threshold(len(server.entries))), refused
            continue
        opened += 1
        dropped = {name for step in STEPS[:3] for name in ring.drops[step]}
        for parts, (total, names) in result.items():
            own = parts.split("+")
            assert names == tuple(n for n in sends if n not in dropped and own[0] in sends[n])
            assert len(names) >= LEAST
            assert total == plain(sends, weights, numbers, names, own)
        survivors = ring.server.survivors
        for part in SIZES:
            senders = [name for name in survivors if part in sends[name]]
            assert (len(senders) >= LEAST) == any(part in parts.split("+") for parts in result)
    assert opened > 40


SENDS = dict.fromkeys("abcdef", ("low", "top"))
WEIGHTS = {name: 10 + i for i, name in enumerate("abcdef")}


def trained(drops: Mapping[str, Sequence[str]] = {}) -> tuple[Ring, dict[str, dict[str, Ints]]]:
    numbers = drawn(SENDS, np.random.default_rng(0))
    ring = Ring(members_of(SENDS, WEIGHTS), drops)
    ring.until_train()
    ring.train(numbers)
    return ring, numbers


def test_a_message_looks_like_noise_and_the_same_numbers_never_twice_alike() -> None:
    numbers = {name: {"low": np.zeros(3, np.int64), "top": np.zeros(2, np.int64)} for name in SENDS}
    seen = set()
    for _ in range(20):
        ring = Ring(members_of(SENDS, WEIGHTS))
        ring.until_train()
        members, server = ring.members, ring.server
        for name in server.members:
            question = server.train_question(name)
            members[name].asked("train", question)
            [words] = members[name].masked(question, {0: np.zeros(5, np.int64)}).values()
            seen |= set(server.roster.fixed.signed(words).tolist())
    assert len(seen) == 20 * 6 * 5
    assert numbers


def test_a_sum_is_opened_with_one_member_gone_after_each_step() -> None:
    for step in STEPS:
        ring, numbers = trained({step: ["c"]})
        ring.until_open()
        left = [name for name in SENDS if name != "c" or step in ("survivors", "open")]
        assert ring.result() == {"low+top": (plain(SENDS, WEIGHTS, numbers, left, ("low", "top")), tuple(left))}


def test_with_fewer_than_the_threshold_nothing_is_opened() -> None:
    ring, _ = trained({"train": ["c"], "open": ["d"]})  # 5 of 6 are needed
    ring.until_open()
    with pytest.raises(WireError, match="do not fit together"):
        ring.result()


def test_a_wrong_share_is_passed_over_and_too_many_are_said() -> None:
    ring, numbers = trained()
    ring.until_open()
    for _ in range(6):
        ring.server.shares["b"] = [bytes(33)] * len(ring.server.shares["b"])
    assert ring.result()["low+top"][0] == plain(SENDS, WEIGHTS, numbers, list(SENDS), ("low", "top"))
    ring.server.shares["d"] = [bytes(33)] * len(ring.server.shares["d"])
    with pytest.raises(WireError, match="do not fit together"):
        ring.result()


def test_wrong_shares_are_tried_for_one_secret_and_not_for_every_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 members one that spoils its shares kept the server for a quarter of an hour."""
    ring, numbers = trained()
    ring.until_open()
    ring.server.shares["a"] = [bytes(33)] * len(ring.server.shares["a"])
    joined, join = list[int](), shamir.join
    monkeypatch.setattr(shamir, "join", lambda shares: joined.append(len(shares)) or join(shares))
    assert ring.result()["low+top"][0] == plain(SENDS, WEIGHTS, numbers, list(SENDS), ("low", "top"))
    assert len(joined) == len(SENDS) + 1


def test_who_deals_wrong_shares_of_its_own_secrets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it spoils the sum: nobody can take its mask away."""
    split = shamir.split
    numbers = drawn(SENDS, np.random.default_rng(0))
    ring = Ring(members_of(SENDS, WEIGHTS))
    own = ring.members["c"].secrets.mask

    def dealt(secret: bytes, threshold: int, count: int) -> list[bytes]:
        bad = ring.members["c"].secrets.seeds and secret.hex() in ring.members["c"].secrets.seeds.values()
        return [bytes(33)] * count if bad or secret.hex() == own else split(secret, threshold, count)

    monkeypatch.setattr(shamir, "split", dealt)
    ring.until_train()
    ring.train(numbers)
    ring.until_open()
    with pytest.raises(WireError, match="the shares of c's secrets do not fit together"):
        ring.result()


def test_a_spoiled_box_costs_one_share() -> None:
    numbers = drawn(SENDS, np.random.default_rng(0))
    ring = Ring(members_of(SENDS, WEIGHTS))
    ring.until_train()
    ring.server.sealed["a"]["b"] = bytes(len(ring.server.sealed["a"]["b"]))
    ring.train(numbers)
    ring.until_open()
    assert ring.result()["low+top"][0] == plain(SENDS, WEIGHTS, numbers, list(SENDS), ("low", "top"))


# ------------------------------------------------------------------------- what a hostile server may try


def asked(member: Member, step: str, question: Mapping[str, bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        again(member).answer(step, question)


def test_the_same_question_gets_the_same_answer_and_another_none() -> None:
    ring = Ring(members_of(SENDS, WEIGHTS))
    server, a = ring.server, ring.members["a"]
    for name, member in ring.members.items():
        server.take_keys(name, member.answer("keys", {}), member.secrets.weight)
    question = server.close_roster(ring.groups_of(tuple(SENDS)))
    answer = a.answer("shares", question)
    assert again(a).answer("shares", question) == answer
    names = [name for name in SENDS if name != "f"]
    fewer = {
        "names": repr(names).replace("'", '"').encode(),
        "keys": b"".join(server.entries[name] for name in names),
        "signatures": b"".join(server.proofs[name] for name in names),
    }
    asked(a, "shares", fewer, "asked a second time for 'shares'")


def test_the_masks_of_who_began_otherwise_do_not_cancel() -> None:
    """A server sends the model to a alone, and to the others one that learns nothing."""

    def begun(one: str, other: str) -> bytes:
        return b"the model" if one == "a" else alike(one, other)

    numbers = drawn(SENDS, np.random.default_rng(0))
    ring = Ring(members_of(SENDS, WEIGHTS, begun=begun))
    ring.until_train()
    ring.train(numbers)
    ring.until_open()
    found, plainly = ring.result()["low+top"][0], plain(SENDS, WEIGHTS, numbers, list(SENDS), ("low", "top"))
    assert all(one != other for one, other in zip(found, plainly, strict=True))


def test_numbers_are_masked_once() -> None:
    ring, numbers = trained()
    a = ring.members["a"]
    question = ring.server.train_question("a")
    assert a.asked("train", question) == {}  # whoever asks again gets nothing
    del ring.server.sealed["f"]
    with pytest.raises(WireError, match="asked a second time for 'train'"):
        a.asked("train", ring.server.train_question("a"))
    assert numbers


def test_no_second_list_of_survivors_is_signed() -> None:
    ring, _ = trained()
    a = ring.members["a"]
    a.answer("survivors", ring.survivors())
    ring.server.arrived.remove("f")
    asked(a, "survivors", ring.survivors(), "asked a second time for 'survivors'")


def test_nobody_reveals_both_shares_of_a_survivor() -> None:
    """The server says to half of the members that f has dropped out; no list then has enough signatures."""
    ring, _ = trained()
    server = ring.server
    whole = ring.survivors()
    for name in "def":
        server.take_signature(name, ring.members[name].answer("survivors", whole))
    with_f = {"signers": server.open_question()["signers"], "signatures": server.open_question()["signatures"]}
    server.arrived.remove("f")
    server.signatures.clear()
    for name in "abc":
        server.take_signature(name, ring.members[name].answer("survivors", ring.survivors()))
    for name in "abc":
        asked(ring.members[name], "open", server.open_question(), "3 signatures under the survivors are too few")
        asked(ring.members[name], "open", with_f, "names somebody who is not in this sum|are too few")
    for name in "de":
        asked(ring.members[name], "open", with_f, "3 signatures under the survivors are too few")


def test_a_member_opens_nothing_before_it_has_sent_its_numbers() -> None:
    ring = Ring(members_of(SENDS, WEIGHTS))
    ring.until_train()
    a = ring.members["a"]
    asked(a, "survivors", {"survivors": b'["a","b","c","d","e","f"]'}, "numbers have not been asked for")
    asked(a, "open", {"signers": b"[]", "signatures": b""}, "the survivors have not been said")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["b", "c", "d", "e", "f"], "not among its members"),
        (["a", "b", "c", "d"], "4 of 6 members are too few; expected 5"),
        (["a", "b", "c", "d", "d"], "twice, or not in order"),
        (["a", "b", "c", "d", "x"], "not in this sum"),
        ("abc", "not in this sum"),
        (["a", ["b"]], "not in this sum"),
    ],
)
def test_a_list_of_survivors_that_is_none_is_refused(names: object, reason: str) -> None:
    import json

    ring, _ = trained()
    asked(ring.members["a"], "survivors", {"survivors": json.dumps(names).encode()}, reason)


@pytest.mark.parametrize(
    "change", ["two", "twice", "own", "same key", "weight", "short", "no json", "nested", "extra"]
)
def test_a_roster_that_is_none_is_refused(change: str) -> None:
    ring = Ring(members_of(SENDS, WEIGHTS))
    server = ring.server
    for name, member in ring.members.items():
        server.take_keys(name, member.answer("keys", {}), member.secrets.weight)
    if change == "two":
        server.entries = {name: server.entries[name] for name in "ab"}
        with pytest.raises(WireError, match="of 2 clients"):
            server.close_roster(())
        server.entries["c"] = server.entries["b"]
    if change == "own":
        server.entries["a"] = server.entries["a"][:-1] + b"\x07"
    if change == "same key":
        server.entries["b"] = server.entries["c"]
    if change == "weight":
        server.entries["b"] = server.entries["b"][:-8] + bytes(8)
    question = server.close_roster(()) if change != "weight" else None
    if question is None:
        from fedstrata.privacy.sum_terms import named

        question = {
            "names": named("abcdef"),
            "keys": b"".join(server.entries.values()),
            "signatures": b"".join(server.proofs.values()),
        }
    if change == "two":
        question = {**question, "names": b'["a","b"]', "keys": question["keys"][:144]}
    if change == "twice":
        question["names"] = question["names"].replace(b'"c"', b'"b"')
    if change == "short":
        question["keys"] = question["keys"][:-1]
    if change == "no json":
        question["names"] = b"["
    if change == "nested":
        question["names"] = b"[" * 100_000
    if change == "extra":
        question["more"] = b""
    reasons = {
        "two": "has 2 different members",
        "twice": "has 5 different members",
        "own": "its own keys are not among",
        "same key": "two members have the same key",
        "weight": "weight: is 0",
        "short": "keys: has 431 bytes, expected 432",
        "no json": "are no names",
        "nested": "are no names",
        "extra": "found the fields",
    }
    asked(ring.members["a"], "shares", question, reasons[change])


def test_a_point_of_low_order_is_refused() -> None:
    ring = Ring(members_of(SENDS, WEIGHTS))
    server = ring.server
    for name, member in ring.members.items():
        server.take_keys(name, member.answer("keys", {}), member.secrets.weight)
    server.entries["b"] = bytes(32) + server.entries["b"][32:]
    asked(ring.members["a"], "shares", server.close_roster(ring.groups_of(tuple(SENDS))), "low order")


def test_a_part_of_too_few_stays_closed_while_the_others_open() -> None:
    sends = {name: ("low", "top") if name in "ab" else ("top",) for name in "abcdef"}
    numbers = drawn(sends, np.random.default_rng(3))
    ring = Ring(members_of(sends, WEIGHTS))
    ring.until_train()
    ring.train(numbers)
    ring.until_open()
    assert set(ring.result()) == {"top"}
    assert ring.result()["top"][0] == plain(sends, WEIGHTS, numbers, list(sends), ("top",))
    assert len(next(iter(ring.server.shares.values()))) == 6  # of a and b not the seeds of both groups
