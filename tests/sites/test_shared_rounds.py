"""A round of masked sums that is asked of other sites again: what each site brings stands in one sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_in_memory import Village

import fedstrata
from fedstrata.errors import UserError
from fedstrata.exchanges import sums
from fedstrata.exchanges.sums import SummedHalf
from fedstrata.privacy.opening import Opening
from fedstrata.privacy.sum_terms import only_one_opens
from fedstrata.server.rounds import Rounds
from fedstrata.wire.codec import WireError

Jobs = Callable[..., dict[str, Any]]
NAMES = tuple("abcdefg")
LABELS = ["eye", "heart", "kidney"]
SHARED = {"level": "client", "clip": 0.125, "noise": 2.0, "sum_only": True, "honest": 4}


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    made = Village(tmp_path, monkeypatch, NAMES)
    for name in NAMES:
        made.site(name, "[require]", "[require]\nhonest = 4")
    return made


def opened(village: Village, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *rosters: str) -> list[str]:
    """Whose sums a server opens that plays one round with several lists of sites; in capitals not to the end."""
    found, play, ask_late = list[str](), SummedHalf._train, sums._Steps.ask_late

    def seen(half: SummedHalf, loop: Rounds, round: int, opening: Opening) -> None:
        found.extend("".join(names) for _, names in opening.result().values())
        raise WireError("the model stays as it was, to be asked of others")

    def playing(half: SummedHalf, loop: Rounds, round: int) -> list[str]:
        for roster in rosters:
            late = ask_late if roster.islower() else lambda *args: close(found)
            monkeypatch.setattr(sums, "sample_clients", lambda *args, roster=roster: list(roster.lower()))
            monkeypatch.setattr(sums._Steps, "ask_late", late)
            with suppress(WireError, UserError):
                play(half, loop, round)
        raise RuntimeError("it has seen enough")

    monkeypatch.setattr(SummedHalf, "open", seen)
    monkeypatch.setattr(SummedHalf, "_train", playing)
    with pytest.raises(RuntimeError, match="seen enough"):
        fedstrata.run(village.jobs(made, quorum=0.1, deadline=3.0)[1])
    return found


def shared(job: Jobs) -> dict[str, Any]:
    """A job whose sites share noise."""
    return job("fedavg", "classify", 1, task={"labels": LABELS}, privacy=SHARED, method={"rounds": 1})


def close(found: list[str]) -> None:
    raise WireError(f"the server was killed, {len(found)} sums are open")


def test_what_a_site_brings_to_a_round_stands_in_one_sum(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums with its noise and three others' each hold more of its change than one sum with that of four."""
    assert opened(village, shared(job), monkeypatch, "abcd", "aefg") == ["abcd"]


def test_a_round_is_asked_again_of_nearly_the_same_sites(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the six of a round whose sum was not opened five are there again."""
    assert opened(village, shared(job), monkeypatch, "ABCDEF", "bcdef") == ["bcdef"]


def test_no_other_sites_open_a_second_sum_of_a_part_that_few_send(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven of ten did, who do not send the layer; the difference of its two sums was the change of one site."""
    layers = {"default": 1, **dict.fromkeys("abcd", 2)}
    method = {"rounds": 1, "variant": "all", "local_layers": layers}
    made = job("fedbfpt", "mlm", 2, privacy={"sum_only": True}, method=method)
    village = Village(tmp_path, monkeypatch, tuple("abcdefghijk"))
    assert opened(village, made, monkeypatch, "abcd", "bcdefghijk") == ["abcd", "efghijk"]


@pytest.mark.parametrize(
    ("one", "other", "honest", "expected"),
    [
        ("abcd", "aefg", 4, False),
        ("abcdefghij", "abcdefgh", 2, True),
        ("abcdefghij", "abcdefg", 2, False),  # two of seven may be colluding, and two would open both
        ("abcdefghij", "abcdefg", 6, True),  # one at most
        ("abcdefghij", "fghij", 5, True),
        ("abcdefghij", "ghij", 4, False),  # seven of the ten open theirs, and three of the four
    ],
)
def test_of_two_lists_one_sum_opens_where_too_few_can_be_colluding(
    one: str, other: str, honest: int, expected: bool
) -> None:
    assert only_one_opens(one, other, honest) is only_one_opens(other, one, honest) is expected


def test_of_one_list_one_sum_opens() -> None:
    assert all(only_one_opens(range(n), range(n), honest) for n in range(3, 257) for honest in (2, n))
