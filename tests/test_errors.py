"""The tail of an error sentence."""

from __future__ import annotations

import pytest

from fedstrata.errors import UserError, did_you_mean


@pytest.mark.parametrize(
    ("found", "legal", "tail"),
    [
        ("fedagv", ["fedavg", "fedprox"], "did you mean 'fedavg'? (legal: fedavg, fedprox)"),
        ("fedproxx", ("fedavg", "fedprox"), "did you mean 'fedprox'? (legal: fedavg, fedprox)"),
        ("zzz", ["fedavg", "fedprox"], "legal: fedavg, fedprox"),
        ("", ["a"], "legal: a"),
        ("a", [], "legal: "),
        ("12", [1, 2], "did you mean '2'? (legal: 1, 2)"),
    ],
)
def test_did_you_mean(found: str, legal: list[str], tail: str) -> None:
    assert did_you_mean(found, legal) == tail


def test_did_you_mean_takes_any_iterable() -> None:
    assert did_you_mean("rownds", iter(["rounds", "name"])) == "did you mean 'rounds'? (legal: rounds, name)"
    assert did_you_mean("keyz", {"key": 1, "value": 2}) == "did you mean 'key'? (legal: key, value)"


def test_a_user_error_is_its_sentence() -> None:
    assert str(UserError("what is wrong, and what is legal")) == "what is wrong, and what is legal"
    assert not issubclass(UserError, ValueError)  # so that no handler of library errors swallows it
