"""What a site remembers of its answers in a run."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.sites.answers import KEPT_ROUNDS, SESSIONS, Answer, Answers, work_digest
from fedstrata.sites.permission import Refused
from fedstrata.sites.release_log import release_of
from fedstrata.wire.tensor_file import pack
from full_disk import full_after


def request(round: int = 0, server: tuple[str, ...] = ()) -> Request:
    return Request(round, "a", Plan((0, 1), ("head",), ("head",), server=server), "train", {}, {})


def kept(answers: Answers, round: int, seconds: float = 1.0) -> bytes:
    message = pack({"head": torch.full((3,), float(round))}, {})
    digest = release_of(message.pieces(), "", round, "weights", (), 9).sha256
    answer, stored = answers.keep(Answer(round, "weights", f"asked-{round}", 9, seconds), message)
    assert (answer.sha256, bytes(stored)) == (digest, bytes(message))
    return bytes(message)


def test_a_session_is_held_for_one_request_and_not_for_ever(tmp_path: Path) -> None:
    asked = request(server=("layer.1",))
    for _ in range(SESSIONS):
        answers = Answers(tmp_path)  # its program was started again in between
        assert answers.find(asked, "weights", "asked", True) is None
        answers.begin(Answer(0, "weights", "asked", 9))
        with pytest.raises(Refused, match="has answered another request for weights of round 1"):
            answers.find(asked, "weights", "other", True)
    with pytest.raises(Refused, match=f"has held {SESSIONS} sessions for round 1 already"):
        answers.find(asked, "weights", "asked", True)


def alike(before: int) -> list[torch.Tensor]:
    """Two tensors of one XXH3 digest, if so many bytes come before them.

    With its secret's own bytes in half of a lane it only adds the lane: what one stripe has more, another less.
    """
    made = []
    for more in (0, 0x300030):
        content = bytearray(torch.full((1024,), 0.5).numpy().tobytes())
        for stripe, secret, sign in ((1, 0x2C81017C, 1), (3, 0xA4A44072, -1)):
            place = 1024 + 64 * stripe - before
            struct.pack_into("<II", content, place, secret, 0x3F003F00 + sign * more)
        made.append(torch.frombuffer(content, dtype=torch.float32))
    return made


def test_what_is_carried_out_anew_for_the_same_request_is_not_for_another_model() -> None:
    """Answers to masked sums cannot be sent again: with another model of the same digest came another sum."""
    asked = replace(request(), versions={"head": 1})

    def digests(before: int, again: bool) -> set[str]:
        sites = [SimpleNamespace(shared={"head": (1, {"w": own})}) for own in alike(before)]
        return {work_digest(site, asked, again) for site in sites}  # type: ignore[arg-type]

    met = next(before for before in range(1000) if len(digests(before, again=False)) == 1)
    assert torch.isfinite(torch.stack(alike(met))).all()
    assert len(digests(met, again=True)) == 2


def test_answers_of_the_last_rounds_are_kept_and_of_the_others_that_they_were_given(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    sent = [kept(answers, round) for round in range(KEPT_ROUNDS + 1)]
    answers = Answers(tmp_path)
    assert answers.seconds == KEPT_ROUNDS + 1
    with pytest.raises(Refused, match="its answer to round 1 was sent long ago"):
        answers.find(request(0), "weights", "asked-0", False)
    for round in range(1, KEPT_ROUNDS + 1):
        found = answers.find(request(round), "weights", f"asked-{round}", False)
        assert found is not None
        assert bytes(found[1]) == sent[round]
    assert answers.find(request(99), "weights", "asked-99", False) is None


def test_an_answer_that_the_disk_has_no_room_for_takes_none(tmp_path: Path) -> None:
    answers, message = Answers(tmp_path), pack({"head": torch.zeros(10_000)}, {})
    with full_after(20_000), pytest.raises(OSError, match=r"0-weights\.part\.answer"):
        answers.keep(Answer(0, "weights", "asked", 9), message)
    assert list(answers.folder.iterdir()) == []


def test_of_a_site_that_seldom_answers_as_many_answers_are_kept(tmp_path: Path) -> None:
    """In asynchronous rounds a server that was killed may ask for what was asked many rounds ago."""
    answers, rounds = Answers(tmp_path), (0, 6, 25, 31)
    sent = {round: kept(answers, round) for round in rounds}
    assert len(rounds) == KEPT_ROUNDS
    for round in rounds:
        found = answers.find(request(round), "weights", f"asked-{round}", False)
        assert found is not None
        assert bytes(found[1]) == sent[round]
    kept(answers, 32)
    with pytest.raises(Refused, match="its answer to round 1 was sent long ago"):
        answers.find(request(0), "weights", "asked-0", False)
    kept(answers, 3)  # it had not been asked for that before


def test_a_line_that_was_being_written_is_dropped_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    kept(answers, 0)
    kept(answers, 1)
    index = tmp_path / "answers.jsonl"
    whole = index.read_bytes()
    index.write_bytes(whole + b'{"round": 2, "pay')
    assert set(Answers(tmp_path).known) == {(0, "weights"), (1, "weights")}
    assert index.read_bytes() == whole
    index.write_bytes(whole.replace(b'"round": 0', b'"ruond": 0'))
    with pytest.raises(Refused, match="what it keeps of its answers is damaged"):
        Answers(tmp_path)
