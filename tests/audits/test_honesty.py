"""An audit says what it did not attack, what it took wrongly, and refuses what would look like an all-clear."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.errors import UserError
from fedstrata.plan.kinds import AUDIT
from fedstrata.reports.audit import read_audit

Jobs = Callable[..., dict[str, Any]]
Audited = Callable[..., dict[str, Any]]
LOWEST = re.compile(
    r"reads (?:the text exactly: )?(\d+) of (\d+) tokens at their places, and takes ([\d,]+) others"
)


def test_wrong_places_are_told_and_chance_is_called_chance(audited: Audited) -> None:
    lora = {"kind": "lora", "rank": 4, "merge": "freeze_a"}
    stages = [audited("fedavg", "classify"), audited("fedavg", "classify", adapter=lora)]
    by_chance = 0
    for finding in (finding for stage in stages for finding in stage["findings"]):
        if "places recall" not in finding["figures"]:
            continue
        hits, cases, wrong = (int(n.replace(",", "")) for n in LOWEST.search(finding["sentence"]).groups())  # type: ignore[union-attr]
        precision = finding["figures"]["places precision"]
        assert precision["count"] == [hits, hits + wrong]
        assert finding["figures"]["places recall"]["count"] == [hits, cases]
        assert ("as chance would" in finding["sentence"]) == precision["holds_chance"]
        by_chance += precision["holds_chance"]
    assert by_chance, "in one of these the threshold lets every token pass"


def test_a_draw_of_nobody_is_no_defense(audited: Audited) -> None:
    tables = {"privacy": {"level": "example", "noise": 1.0}, "task": {"labels": ["eye", "heart", "kidney"]}}
    for seed in range(4):
        stage = audited("fedavg", "classify", train={"seed": seed}, **tables)
        played = {play["setting"]: play["texts"] for play in stage["plays"]}
        empty = [setting for setting, texts in played.items() if not texts]
        assert {finding["setting"] for finding in stage["findings"]} == played.keys() - set(empty)
        for setting in empty:
            assert (
                f"{setting}: the draw of examples took none of the client's, so nothing was attacked"
                in stage["notes"]
            )
        if empty:
            return
    raise AssertionError("one of four draws of a text in four is expected to be empty")


def test_parts_of_later_rounds_and_attacks_left_out_are_named(audited: Audited, job: Jobs, public: str) -> None:
    stage = audited("fedavg", "classify", wire={"part_period": 2})
    [later] = [note for note in stage["notes"] if "sent in a later round" in note]
    attacked = {finding["channel"] for finding in stage["findings"]}
    assert ("embeddings" in later) == ("embeddings" not in attacked)
    [stage] = fedstrata.audit(job("fedavg", "classify"), attacks=["layers"], public=public)["stages"]
    assert "embeddings: not attacked, as --attacks leaves out embeddings" in stage["notes"]
    assert "head: not attacked, as --attacks leaves out class_head" in stage["notes"]
    with pytest.raises(
        UserError, match=r"--attacks: hidden_states, token_head fits nothing .* embeddings, class_head"
    ):
        fedstrata.audit(job("fedavg", "classify"), attacks=["hidden_states", "token_head"], public=public)
    with pytest.raises(UserError, match="--attacks: names one more than once: layers, layers"):
        fedstrata.audit(job("fedavg", "classify"), attacks=["layers", "layers"], public=public)
    with pytest.raises(UserError, match="--client: '' is no client"):
        fedstrata.audit(job("fedavg", "classify"), client="", public=public)


def test_public_text_without_a_known_word_is_refused(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("zzz qqq xxx\n" * 30, "utf-8")
    with pytest.raises(UserError, match=r"--public: .*other.txt has no token that the model's tokenizer knows"):
        fedstrata.audit(job("fedavg", "classify"), public=str(tmp_path / "other.txt"))


def test_where_nothing_leaves_nothing_is_told(audited: Audited) -> None:
    assert audited("local", "classify")["notes"] == ["nothing leaves the clients: there is nothing to attack"]
    assert any("beside the attacks the server is told" in note for note in audited("fedavg", "classify")["notes"])


@pytest.mark.parametrize("place", ["file", "foreign", "/proc/none"])
def test_the_output_folder_is_tried_first(
    job: Jobs, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("fedstrata.audits.audit._stage", lambda *args: pytest.fail("it was played"))
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"\[output\] dir: "):
        fedstrata.audit(job("fedavg", "classify"), {"output.dir": str(tmp_path / place)}, public=public)
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["notes.txt"]


def test_a_foreign_record_is_none(job: Jobs, tmp_path: Path) -> None:
    folder = fedstrata.run(job("fedavg", "classify")).folder
    for text in ('{"format": 1, "stages": [{"stage": 5}]}', '{"format": 1, "stages": [5]}', "{"):
        (folder / AUDIT).write_text(text)
        assert read_audit(folder) == []
        assert fedstrata.report(folder).exists()
    (folder / AUDIT).write_text(json.dumps({"format": 1}))
    assert read_audit(folder) == []
