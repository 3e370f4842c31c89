"""The tail of an error sentence."""

from __future__ import annotations

import pytest

from fedstrata.errors import UserError, did_you_mean, first_words, plural


@pytest.mark.parametrize(
    ("found", "expected", "tail"),
    [
        ("fedagv", ["fedavg", "fedprox"], "did you mean 'fedavg'? (expected one of: fedavg, fedprox)"),
        ("fedproxx", ("fedavg", "fedprox"), "did you mean 'fedprox'? (expected one of: fedavg, fedprox)"),
        ("zzz", ["fedavg", "fedprox"], "expected one of: fedavg, fedprox"),
        ("", ["a"], "expected one of: a"),
        ("a", [], "expected one of: "),
        ("12", [1, 2], "did you mean '2'? (expected one of: 1, 2)"),
    ],
)
def test_did_you_mean(found: str, expected: list[str], tail: str) -> None:
    assert did_you_mean(found, expected) == tail


def test_did_you_mean_takes_any_iterable() -> None:
    assert (
        did_you_mean("rownds", iter(["rounds", "name"]))
        == "did you mean 'rounds'? (expected one of: rounds, name)"
    )
    assert did_you_mean("keyz", {"key": 1, "value": 2}) == "did you mean 'key'? (expected one of: key, value)"


def test_a_user_error_is_its_sentence() -> None:
    assert str(UserError("what is wrong, and what is expected")) == "what is wrong, and what is expected"
    assert not issubclass(UserError, ValueError)  # so that no handler of library errors swallows it


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Error no file named x.", "no file named x"),
        ("Validation error for field 'size':\n    TypeError: expected int.\nmore", "expected int"),
        ("\n  first\nsecond", "first"),
        ("", "ValueError"),
    ],
)
def test_what_a_library_says_first(said: str, words: str) -> None:
    assert first_words(ValueError(said)) == words


def test_one_is_singular() -> None:
    assert [plural(number, "row") for number in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]
