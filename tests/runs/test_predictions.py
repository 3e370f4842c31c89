"""Confusion matrix, classes and predictions of the final model, against those of the saved model itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fedstrata
from fedstrata.events import Noted, StageStarted
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


def own_predictions(folder: Path) -> list[str]:
    """What the saved model says, by plain transformers, text by text."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        guesses = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text, _ in SENTENCES]
    return [model.config.id2label[guess] for guess in guesses]


@pytest.mark.parametrize("engine", [{"name": "inprocess"}, {"name": "pool", "workers": 2}])
def test_predictions_are_those_of_the_saved_model(job: Jobs, engine: dict[str, Any]) -> None:
    result = fedstrata.run(job("fedavg", "classify", output={"predictions": True}, engine=engine))
    assert result.model_folder is not None
    lines = [json.loads(line) for line in (result.folder / "predictions.jsonl").read_text("utf-8").splitlines()]
    assert [line["example"] for line in lines] == list(range(len(SENTENCES)))
    assert [line["label"] for line in lines] == [label for _, label in SENTENCES]
    assert [line["prediction"] for line in lines] == own_predictions(result.model_folder)
    right = sum(line["label"] == line["prediction"] for line in lines)
    found = json.loads((result.folder / "classes.json").read_text("utf-8"))
    matrix = found["confusion"]
    assert sum(map(sum, matrix)) == len(SENTENCES)
    assert sum(matrix[i][i] for i in range(len(matrix))) == right
    assert result.score["accuracy"] == pytest.approx(right / len(SENTENCES))
    assert result.score["macro_f1"] == pytest.approx(sum(one["f1"] for one in found["classes"]) / 3)
    for i, one in enumerate(found["classes"]):
        predicted = sum(row[i] for row in matrix)
        assert one["precision"] == pytest.approx(matrix[i][i] / predicted if predicted else 0)
        assert one["examples"] == sum(matrix[i])


@pytest.mark.parametrize(
    ("name", "clients"), [("centralized", 3), ("single", 3), ("local", 1), ("fedsplitbert", 1)]
)
def test_of_a_model_that_one_client_keeps_they_are_that_models(job: Jobs, name: str, clients: int) -> None:
    """The start model was scored at the server, what the run came to at the client."""
    made = job(name, "classify", output={"predictions": True}, clients={"count": clients})
    result = fedstrata.run(made)
    assert result.model_folder is not None
    lines = predictions(result)
    assert [line["prediction"] for line in lines] == own_predictions(result.model_folder)
    right = sum(line["label"] == line["prediction"] for line in lines)
    matrix = json.loads((result.folder / "classes.json").read_text("utf-8"))["confusion"]
    assert sum(matrix[i][i] for i in range(len(matrix))) == right
    assert result.score["accuracy"] == pytest.approx(right / len(SENTENCES))


def test_entities_have_a_line_each(job: Jobs, tmp_path: Path) -> None:
    rows = [
        {"text": text.split(), "label": ["B-X" if w == "kidney" else "O" for w in text.split()]}
        for text, _ in SENTENCES
    ]
    result = fedstrata.run(job("fedavg", "tag", data={"train": rows, "test": rows}, output={"predictions": True}))
    found = json.loads((result.folder / "classes.json").read_text("utf-8"))
    assert [one["class"] for one in found["classes"]] == ["X"]
    assert found["classes"][0]["examples"] == sum(row["label"].count("B-X") for row in rows)
    assert found["classes"][0]["f1"] == pytest.approx(result.score["f1"])
    first = json.loads((result.folder / "predictions.jsonl").read_text("utf-8").splitlines()[0])
    assert first["label"] == rows[0]["label"]
    page = fedstrata.report(result.folder).read_text("utf-8")
    assert "Classes" in page


def test_the_page_has_the_matrix_and_a_run_without_asking_has_no_predictions(job: Jobs) -> None:
    events = list[Any]()
    result = fedstrata.run(job("fedavg", "classify"), callbacks=[events.append])
    assert any(isinstance(event, StageStarted) for event in events)
    assert not (result.folder / "predictions.jsonl").exists()
    page = fedstrata.report(result.folder).read_text("utf-8")
    assert "<title>Confusion matrix</title>" in page
    assert not (
        fedstrata.run(job("fedavg", "mlm", output={"dir": str(result.folder.parent / "mlm")})).folder
        / "classes.json"
    ).exists()


@pytest.mark.parametrize("name", ["local", "fedsplitbert"])
def test_where_clients_score_models_of_their_own_there_are_no_predictions(job: Jobs, name: str) -> None:
    """The start model was scored before the first round; what it predicts is not what the run has come to."""
    said = list[Any]()
    result = fedstrata.run(job(name, "classify", output={"predictions": True}), progress=said.append)
    assert not (result.folder / "predictions.jsonl").exists()
    assert not (result.folder / "classes.json").exists()
    notes = [event.sentence for event in said if isinstance(event, Noted)]
    assert "output.predictions: nothing is written, because the clients score the model, each " in notes[-1]
    assert "Confusion matrix" not in fedstrata.report(result.folder).read_text("utf-8")


@pytest.mark.parametrize("name", ["fedavg", "single"])
def test_a_run_killed_before_they_were_written_writes_them_when_it_is_resumed(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def files(folder: Path) -> list[bytes]:
        return [(folder / name).read_bytes() for name in ("classes.json", "predictions.jsonl")]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    made = job(name, "classify", output={"predictions": True})
    with monkeypatch.context() as patch:
        patch.setattr("fedstrata.runs.train.write_predictions", killed)
        with pytest.raises(KeyboardInterrupt):
            fedstrata.run(made)
    resumed = fedstrata.run(made, resume=True)
    whole = fedstrata.run({**made, "output": {**made["output"], "dir": str(tmp_path / "whole")}})
    assert files(resumed.folder) == files(whole.folder)


def predictions(result: fedstrata.Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "predictions.jsonl").read_text("utf-8").splitlines()]


ROWS: list[dict[str, Any]] = [
    {"text": "", "label": "eye"},  # dropped
    *({"text": text, "label": label} for text, label in SENTENCES),
    {"text": "The eye.", "label": None},  # dropped
    {"text": "The kidney keeps salt in balance.", "label": "kidney"},
]
"""Rows of which two are dropped: the first kept one is the user's row 1, the last one is row 14."""


def test_a_prediction_names_the_row_of_the_users_file(job: Jobs) -> None:
    made = job("fedavg", "classify", data={"test": ROWS}, output={"predictions": True})
    lines = predictions(fedstrata.run(made))
    assert [line["row"] for line in lines] == [*range(1, 13), 14]
    assert [line["example"] for line in lines] == list(range(13))
    assert all(line["label"] == ROWS[line["row"]]["label"] for line in lines)
    assert not any("chunk" in line or "source" in line for line in lines)


def test_the_row_of_a_held_out_example_is_that_of_the_training_source(job: Jobs) -> None:
    made = job("fedavg", "classify", output={"predictions": True}, clients={"count": 2})
    made["data"] = {"train": ROWS, "holdout": 0.4}
    lines = predictions(fedstrata.run(made))
    rows = [line["row"] for line in lines]
    assert rows == sorted(set(rows))
    assert len(rows) == 5
    assert rows != list(range(5))
    assert all(line["label"] == ROWS[line["row"]]["label"] for line in lines)


def test_of_several_chunks_each_says_which_it_is(job: Jobs) -> None:
    rows = [
        {"text": text.split(), "label": ["B-X" if w == "kidney" else "O" for w in text.split()]}
        for text in ("A kidney.", "The kidney filters the blood and keeps salt in balance.", "The eye.")
    ]
    made = job("fedavg", "tag", data={"train": rows, "test": rows}, output={"predictions": True})
    made["train"]["max_tokens"] = 8
    made["clients"]["count"] = 2
    lines = predictions(fedstrata.run(made))
    several = [line for line in lines if line["row"] == 1]
    assert len(several) > 1
    assert [line["chunk"] for line in several] == list(range(len(several)))
    assert [tag for line in several for tag in line["label"]] == rows[1]["label"]
    assert [(line["row"], "chunk" in line) for line in (lines[0], lines[-1])] == [(0, False), (2, False)]


def test_rows_of_named_sources_are_counted_in_their_own(job: Jobs) -> None:
    sources = {"north": ROWS, "south": ROWS[1:]}
    lines = predictions(
        fedstrata.run(job("fedavg", "classify", data={"test": sources}, output={"predictions": True}))
    )
    assert [(line["source"], line["row"]) for line in lines] == [
        *(("north", row) for row in [*range(1, 13), 14]),
        *(("south", row) for row in [*range(12), 13]),
    ]


def test_a_finished_run_says_that_it_writes_no_predictions(job: Jobs) -> None:
    made = job("fedavg", "classify")
    folder = fedstrata.run(made).folder
    told = list[Any]()
    fedstrata.run(made, ["output.predictions=true"], resume=True, progress=told.append)
    [note] = [event.sentence for event in told if isinstance(event, Noted)]
    assert note.startswith(f"{folder}: its run is finished, so output.predictions writes nothing; ")
    assert not (folder / "predictions.jsonl").exists()
    told.clear()
    asked = {**made, "output": {"dir": str(folder.parent / "asked"), "predictions": True}}
    fedstrata.run(asked)
    fedstrata.run(asked, resume=True, progress=told.append)
    assert not any(isinstance(event, Noted) for event in told)
