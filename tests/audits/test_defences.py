"""Every defence of ``[privacy]`` against its attack: with it the interval holds chance, without it not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstrata
from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import area
from fedstrata.privacy.masked_sums import Member
from tiny import SPECIAL, words

Audited = Callable[..., dict[str, Any]]
Found = dict[tuple[str, str], dict[str, Any]]
ID = {word: i for i, word in enumerate(SPECIAL + words())}
LABELS = {"task": {"labels": ["eye", "heart", "kidney"]}}
STEPS = {"batch_size": 4, "steps": 1}


def areas(stage: dict[str, Any], setting: str = "1 step") -> Found:
    """(channel, attack) -> the area under its curve, of one setting."""
    found = (finding for finding in stage["findings"] if finding["setting"] == setting and finding["figures"])
    return {(finding["channel"], finding["attack"]): finding["figures"]["auc"] for finding in found}


MASKED = {"method": {"local_layers": 2}, "task": {"mask_probability": 0.6}}
OMISSIONS: list[tuple[str, str, dict[str, Any], str, tuple[str, ...]]] = [
    ("fedavg", "classify", {}, "embeddings", ("rows moved", "position rows")),
    ("fedavg", "classify", {}, "position_rows", ("position rows",)),
    ("fedbfpt", "mlm", MASKED, "decoder_bias", ("decoder bias, raised",)),
]


@pytest.mark.parametrize(("name", "kind", "tables", "omitted", "attacks"), OMISSIONS)
def test_what_is_omitted_is_not_there_to_be_attacked(
    audited: Audited, name: str, kind: str, tables: dict[str, Any], omitted: str, attacks: tuple[str, ...]
) -> None:
    tables = {**tables, "train": STEPS}
    before = areas(audited(name, kind, **tables))
    after = areas(audited(name, kind, **tables, privacy={"omit": [omitted]}))
    read = {attack: figure for (_, attack), figure in before.items() if attack in attacks}
    assert read.keys() == set(attacks)
    assert not any(figure["holds_chance"] for figure in read.values())
    assert after
    assert not {attack for _, attack in after} & set(attacks)


def test_nothing_is_read_of_tokens_that_the_public_vocabulary_does_not_list(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the listed ones as much as before: the attack is asked about one kind at a time."""
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text("\n".join(words()[::2]), "utf-8")
    table = {"omit": ["unlisted_rows"], "public_vocabulary": str(vocabulary)}
    listed, unlisted = [ID[word] for word in words()[::2]], True

    def asked(bench: Bench) -> Any:
        chosen = np.ones(bench.vocabulary, dtype=bool)
        chosen[listed] = False
        chosen = chosen if unlisted else ~chosen
        chosen[bench.special] = False
        return chosen

    monkeypatch.setattr(Bench, "ordinary", property(asked))
    key = ("embeddings", "rows moved")
    tables = {"train": {"batch_size": 8, "steps": 1}}
    assert areas(audited("fedavg", "classify", **tables))[key]["value"] == 1.0
    assert areas(audited("fedavg", "classify", **tables, privacy=table))[key]["holds_chance"]
    unlisted = False
    assert areas(audited("fedavg", "classify", **tables, privacy=table))[key]["value"] == 1.0


def test_of_masked_words_the_listed_rows_are_read_as_if_all_were_sent(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is the decoder too: every listed row moves, most of them in one direction; few rows are listed."""
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text("\n".join(words()[::3]), "utf-8")
    listed = np.isin(np.arange(len(ID)), [ID[word] for word in words()[::3]])
    monkeypatch.setattr(Bench, "ordinary", property(lambda bench: listed))
    tables = {"train": {"batch_size": 4, "optimizer": "sgd", "learning_rate": 1.0, "dropout": False, "seed": 1}}
    table = {"omit": ["unlisted_rows"], "public_vocabulary": str(vocabulary)}
    for privacy in ({}, table):
        found = areas(audited("fedavg", "mlm", **tables, privacy=privacy), "1 step, 1 text")
        assert found["embeddings", "direction of rows"]["value"] > 0.95


NOISE: dict[str, dict[str, Any]] = {
    "example": {"level": "example", "clip": 0.1, "noise": 2.0},
    "client": {"level": "client", "clip": 0.1, "noise": 2.0, "single_message": True},
    "example, epsilon": {"level": "example", "clip": 0.1, "epsilon": 1.0},
    "client, epsilon": {"level": "client", "clip": 0.1, "epsilon": 8.0, "single_message": True},
}


@pytest.mark.parametrize("noise", NOISE)
def test_under_noise_no_attack_beats_chance(audited: Audited, noise: str) -> None:
    tables = {**LABELS, "train": {**STEPS, "dropout": False}}
    stages = [audited("fedavg", "classify", **tables, **more) for more in ({}, {"privacy": NOISE[noise]})]
    before, after = (areas(stage) for stage in stages)
    assert ["the loss" in stage["notes"][-1] for stage in stages] == [True, False]
    read = {attack: figure for (channel, attack), figure in before.items() if channel == "embeddings"}
    assert read.keys() == {"rows moved", "position rows"}
    assert not any(figure["holds_chance"] for figure in read.values())
    assert after
    assert all(figure["low"] <= figure["chance"] for figure in after.values()), after


def test_a_masked_message_holds_chance(
    job: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as if there were no masks: rows that were moved are not told from the others."""
    seen: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    masked = Member.masked

    def noted(self: Any, question: Any, numbers: Any) -> Any:
        made = masked(self, question, numbers)
        seen.append((numbers[0], self.roster().fixed.signed(made[0])))
        return made

    monkeypatch.setattr(Member, "masked", noted)
    train = {"optimizer": "sgd", "learning_rate": 1.0, "dropout": False, "steps": 1, "weight_decay": 0.0}
    config = job("fedavg", "classify", 1, method={"rounds": 1}, train=train, privacy={"sum_only": True})
    fedstrata.run(config)
    assert len(seen) == 3

    def rows(numbers: Any) -> Any:
        """The largest number in each row of the table of words, which is the first tensor."""
        return np.abs(numbers[: 32 * len(ID)].astype(float)).reshape(-1, 32).max(1)

    for plain, message in seen:
        truth, scores = (rows(numbers) for numbers in (plain, message))
        assert 5 < (truth > 0).sum() < len(ID) / 2
        assert area(truth, truth > 0).value == 1.0
        assert 0.15 < area(scores, truth > 0).value < 0.85  # masks are drawn anew: an interval of 95 % may miss
