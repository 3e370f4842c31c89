"""What a run says of its rows, its labels and its baseline; and the labels that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.cli.words import score_lines
from fedstrata.data.facts import row_lines, rows_seen_before
from fedstrata.data.prepare import prepare
from fedstrata.errors import UserError
from fedstrata.events import Baseline, Noted, StageStarted
from fedstrata.forecasts.validate import validate
from fedstrata.job.file import load
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


def written(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (["0.0", "1.0"], ["0", "1"], "holds '0' and '0.0', which are the same number"),
        (["True", "False"], ["1", "0"], "holds '0' and 'False', which are the same truth value"),
        (["True", "False"], ["true", "false"], "'False' and 'false', which differ in capital letters alone"),
        (["a", "b"], ["a ", "b"], "holds 'a' and 'a ', which differ in blanks alone"),
        (["s\u00e4ure", "b"], ["sa\u0308ure", "b"], "which differ in Unicode form alone"),
        (
            ["S\u00e4ure", "b"],
            ["sa\u0308ure ", "b"],
            "which differ in blanks, capital letters or Unicode form alone",
        ),
        (["a", "b"], ["a\u200b", "b"], r"holds 'a' and 'a\\u200b', which differ in characters that are not shown"),
        (["soft", "b"], ["so\u00adft", "b"], "which differ in characters that are not shown alone"),
        (["\u200ea", "b"], ["a", "b"], "which differ in characters that are not shown alone"),
        (["a", "b"], ["a\ufe0f", "b"], "which differ in characters that are not shown alone"),
        (["a", "b"], ["a\u3164", "b"], "which differ in characters that are not shown alone"),
        (["A", "b"], ["a \ufeff", "b"], "in characters that are not shown, blanks, capital letters or"),
        (["a", "b"], ["a", "N/A"], "holds 'N/A', which stands for a missing value"),
        (["a", "b"], ["a", "#REF!"], "holds '#REF!', which stands for a missing value"),
        (["a", "b"], ["a", "#DIV/0!"], "holds '#DIV/0!', which stands for a missing value"),
        (["a", "b"], ["a", "NaN"], "holds 'NaN', which stands for a missing value"),
    ],
)
def test_labels_that_do_not_agree_are_refused(
    job: Jobs, tmp_path: Path, train: list[str], test: list[str], words: str
) -> None:
    rows = [[(text, labels[i % 2]) for i, (text, _) in enumerate(SENTENCES)] for labels in (train, test)]
    files = {"train": written(tmp_path / "a.csv", rows[0]), "test": written(tmp_path / "b.csv", rows[1])}
    with pytest.raises(UserError, match=words):
        fedstrata.run(job("fedavg", "classify", data=files))


def test_the_label_is_not_the_text(job: Jobs) -> None:
    with pytest.raises(UserError, match=r"\[data\] label: column 'text' is also the text"):
        fedstrata.run(job("fedavg", "classify", data={"label": "text"}))


def test_a_run_says_what_its_rows_are_and_what_a_score_must_beat(job: Jobs, tmp_path: Path) -> None:
    train = [(text, "eye") for text, _ in SENTENCES[:5]] + [("xyzzy " * 40, "heart")]
    test = [(SENTENCES[0][0], "eye"), ("The heart", "heart"), ("The eye", "eye"), ("The lens", "lens")]
    files = {"train": written(tmp_path / "a.csv", train), "test": written(tmp_path / "b.csv", test)}
    seen: list[Any] = []
    made = job("fedavg", "classify", data=files, method={"rounds": 1})
    result = json.loads((fedstrata.run(made, progress=seen.append).folder / "result.json").read_text("utf-8"))
    data = result["data"]
    assert (data["train_rows"], data["test_rows"], data["test_rows_in_training"]) == (6, 4, 1)
    assert data["classes"] == {"eye": 5, "heart": 1, "lens": 0}
    assert data["long_texts"] == {"count": 1, "rows": 6, "handling": "truncate"}
    assert data["unknown_tokens"]["count"] == 30
    assert sum(client["rows"] for client in result["clients"].values()) == 6
    assert result["baseline"]["what"] == "always the most frequent class, eye"
    assert result["baseline"]["score"]["accuracy"] == 0.5
    [started] = [event for event in seen if isinstance(event, StageStarted)]
    assert "no training row is of class lens, which stands in test rows alone" in started.data
    assert "1 of 4 test rows also stand in the training rows (25.0%)" in started.data
    assert started.baseline.score == result["baseline"]["score"]


def test_where_clients_test_on_rows_of_their_own_each_row_is_counted_once(job: Jobs, tmp_path: Path) -> None:
    """All rows are read as one: what was said of training and test rows was of both together."""
    file = tmp_path / "words.tsv"
    file.write_text("".join("the\tO\neye\tB-x\n" + "xyzzy\tO\n" * n + "\n" for n in range(12)), "utf-8")
    data = {**dict.fromkeys(("train", "test"), str(file)), "long_text": "truncate"}
    made = job("fedavg", "tag", data=data, clients={"test": 0.25}, train={"max_tokens": 8}, method={"rounds": 1})
    del made["data"]["test"]
    folder = fedstrata.run(made).folder
    told = json.loads((folder / "result.json").read_text("utf-8"))["data"]
    assert (told["train_rows"], told["test_rows"]) == (9, 3)
    assert told["long_texts"]["rows"] == 9
    known, tested = told["unknown_tokens"], told["test_unknown_tokens"]
    assert known["tokens"] + tested["tokens"] == sum(min(8, 4 + n) for n in range(12))
    assert known["count"] + tested["count"] == sum(min(4, n) for n in range(12))
    words = sum(told["test_classes"].values())
    assert told["test_words_cut"] == {"count": words - (tested["tokens"] - 2 * 3), "words": words}


@pytest.mark.parametrize(
    ("handling", "why"), [("chunk", "nothing to the"), ("truncate", "cut off, or nothing to the")]
)
def test_words_without_a_score_are_told_for_what_they_are(job: Jobs, handling: str, why: str) -> None:
    """A zero-width blank has no token; no text was cut, and it was said to be cut off."""
    rows = [{"words": ["the", "\u200b", "eye"], "tags": ["O", "O", "B-x"]}] * 8
    data = {"train": rows, "test": rows, "text": "words", "label": "tags", "long_text": handling}
    seen: list[Any] = []
    fedstrata.run(job("fedavg", "tag", data=data, method={"rounds": 1}), progress=seen.append)
    [started] = [event for event in seen if isinstance(event, StageStarted)]
    assert f"of the test rows 8 of 24 words (33.3%) are {why} tokenizer, and no score is of them" in started.data


def test_the_baseline_of_tags_counts_entities_text_by_text(job: Jobs, tmp_path: Path) -> None:
    """Of texts as one, the same tag everywhere was a single entity."""
    file = tmp_path / "words.tsv"
    file.write_text((("the\tI-x\n" * 9 + "\n") * 3 + "the\tO\nheart\tI-x\n\n") * 3, "utf-8")
    data = dict.fromkeys(("train", "test"), str(file))
    for most in (32, 8):
        run = {"dir": str(tmp_path / f"run-{most}")}
        made = job("fedavg", "tag", data=data, train={"max_tokens": most}, method={"rounds": 1}, output=run)
        baseline = fedstrata.run(made).baseline
        assert baseline is not None
        assert baseline["score"]["precision"] == baseline["score"]["recall"] == 0.75
        assert baseline["score"]["accuracy"] == 28 / 29


def test_a_run_that_is_not_above_the_baseline_says_so() -> None:
    always = Baseline("always the most frequent class, eye", "accuracy", {"accuracy": 0.5})
    [line, note] = score_lines(1, {"accuracy": 0.5}, 2, always)
    assert line == "round 2/2  accuracy 0.5000 (baseline 0.5000)"
    assert note == "note: accuracy 0.5000 is not better than predicting always the most frequent class, eye"
    assert len(score_lines(1, {"accuracy": 0.6}, 2, always)) == 1
    assert len(score_lines(1, {"loss": 2.0}, 2, Baseline("always the mean", "loss", {"loss": 1.0}))) == 2


def test_test_rows_that_an_earlier_stage_trains_on_are_told(job: Jobs, tmp_path: Path) -> None:
    """One row without a label, and a stage that needs none had trained on all texts that the next is scored on."""
    rows = [(f"{text} {i}", label) for i in range(5) for text, label in SENTENCES]
    stages = [{"name": "pre", "task": {"kind": "mlm"}}, {"name": "fine", "task": {"kind": "classify"}}]
    made = job("fedavg", method={"rounds": 1}, clients={"count": 2}, train={"steps": 1})
    made = {key: table for key, table in made.items() if key != "task"} | {"stages": stages}

    def told(rows: list[tuple[str, str]], *words: str, **fine: Any) -> list[str]:
        made["data"] = {"train": written(tmp_path / "rows.csv", rows)}
        stages[1] = {"name": "fine", "task": {"kind": "classify"}, **fine}
        seen: list[Any] = []
        result = fedstrata.run(
            {**made, "output": {"dir": str(tmp_path / f"run-{len(words)}")}}, progress=seen.append
        )
        assert result.status == "finished"
        notes = [event.sentence for event in seen if isinstance(event, Noted)]
        return [note for note in notes if note.startswith("stage fine")]

    assert told(rows) == []
    lacking = [(text, "" if i == 3 else label) for i, (text, label) in enumerate(rows)]
    [note] = told(lacking, "lacking")
    assert re.fullmatch(
        r"stage fine: earlier stages train on the text of \d of its 6 test rows; \[data\] test, .*", note
    )
    assert told(lacking, "a", "file", data={"test": written(tmp_path / "test.csv", SENTENCES[:6])}) == []
    own = {"name": "fine", "task": {"kind": "classify"}, "model": made["model"]}
    alone = load({**made, "stages": [stages[0] | {"model": made["model"]}, own], "model": made["model"]})
    assert rows_seen_before(alone, [prepare(one) for one in alone]) == {}, "it starts from a model of its own"


def test_rows_that_no_client_trains_on_are_not_training_rows(job: Jobs, tmp_path: Path) -> None:
    """With ``single`` rows and classes of all clients were told, beside a baseline of the first one's."""
    rows = [(text, label) for text, label in SENTENCES if label != "eye"]
    for name, own in (("first", rows), ("second", [(f"{text} x", "eye") for text, _ in SENTENCES])):
        written(tmp_path / f"{name}.csv", own)
    files = {name: str(tmp_path / f"{name}.csv") for name in ("first", "second")}
    made = job("single", "classify", data={"train": files, "test": files["second"]}, method={"rounds": 1})
    del made["clients"]["count"]
    seen: list[Any] = []
    data = fedstrata.run(made, progress=seen.append).data
    assert data is not None
    assert (data["train_rows"], data["test_rows"], data["test_rows_in_training"]) == (8, 12, 0)
    assert data["classes"] == {"eye": 0, "heart": 4, "kidney": 4}
    assert data["long_texts"]["rows"] == 8
    told = ["8 training rows: first 8", "no training row is of class eye, which stands in test rows alone"]
    [started] = [event for event in seen if isinstance(event, StageStarted)]
    assert set(told) <= set(started.data)
    assert {f"data    {line}" for line in told} <= set(validate(made).lines)


def test_many_clients_are_summed_up() -> None:
    facts = {"train_rows": 2000, "test_rows": 5, "classes": None, "test_classes": None, "test_rows_in_training": 5}
    lines = row_lines(facts, {f"c{i}": 2 for i in range(1000)})
    assert lines[0] == "2,000 training rows: 2 to 2 at each of 1,000 clients, median 2"
    assert lines[-1].startswith("every test row is also a training row")
