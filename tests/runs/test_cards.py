"""What a run leaves for others: model cards, and what it was made with."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tomli_w
import torch

import fedstrata
from fedstrata.job.task_kinds import TASK_KINDS, TaskKind
from fedstrata.models.folders import CARD
from fedstrata.reports import card
from fedstrata.reports.card import END
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


def test_a_model_has_a_card_of_counts_scores_and_costs(job: Jobs, tmp_path: Path) -> None:
    result = fedstrata.run(job("fedbt", "classify", method={"rounds": 1}))
    assert result.model_folder is not None
    card = huggingface_hub.ModelCard.load(result.model_folder / CARD)
    assert card.data.pipeline_tag == "text-classification"
    assert set(card.data.tags) == {"federated-learning", "fedstrata", "fedbt"}
    scores = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert scores == {name: pytest.approx(value, abs=1e-6) for name, value in result.score.items()}
    assert "3 clients, training rows of each: 4 to 4, median 4" in card.text
    assert f"sent {result.bytes['up'] / 1e6:,.1f} MB" in card.text
    assert "training took <0.001 TFLOP." in card.text, "not 0.00"
    assert "without differential privacy" in card.text
    assert "3 classes: eye, heart, kidney" in card.text
    whole = (result.model_folder / CARD).read_text(encoding="utf-8")
    assert str(tmp_path) not in whole, "where things lie on this machine is nobody's business"
    assert "client-0" not in whole, "nor are the clients' names"
    assert not any(text in whole for text in ("kidney filters", "urine")), "nor is any text"


@pytest.mark.parametrize("level", ["none", "example", "client"])
def test_a_card_tells_nothing_of_single_clients_rows_where_there_is_noise(job: Jobs, level: str) -> None:
    if level != "none":
        pytest.importorskip("dp_accounting")
    privacy: dict[str, Any] = {"level": level}
    if level != "none":
        privacy |= {"noise": 1.0, **({"single_message": True} if level == "client" else {})}
    labels = ["eye", "heart", "kidney"]
    made = job("fedavg", "classify", method={"rounds": 1}, privacy=privacy, task={"labels": labels})
    result = fedstrata.run(made)
    assert result.model_folder is not None
    text = (result.model_folder / CARD).read_text("utf-8")
    for counted in ("training rows of each", "always the most frequent class", "TFLOP", "| baseline |"):
        assert (counted in text) is (level == "none"), counted
    assert not any(words in text for words in ("client-0", '"rate"', '"clients"'))
    assert ("are left out: no noise covers them" in text) is (level != "none")
    assert ('"epsilon"' in text) is (level != "none")
    assert ("seed 0" in text) is (level == "none"), "all noise comes from it"
    assert "3 clients" in text
    assert result.baseline is not None, "the user still has it"
    assert result.data is not None
    assert result.data["classes"]


def test_the_card_of_a_stage_without_noise_tells_nothing_that_noise_of_another_hides(job: Jobs) -> None:
    """It told the seed, by which the other's noise can be drawn again and taken away, and the clients' rows."""
    pytest.importorskip("dp_accounting")
    made = job("fedavg", "classify", method={"rounds": 1}, task={"labels": ["eye", "heart", "kidney"]})
    noise = {"level": "client", "noise": 1.0, "single_message": True}
    made["stages"] = [{"name": "first"}, {"name": "second", "privacy": noise}]
    result = fedstrata.run(made)
    for place in (result.folder, *result.folder.glob("stages/*")):
        text = (place / "model" / CARD).read_text("utf-8")
        for told in ("seed 0", "training rows of each", "always the most frequent class", "TFLOP", "| baseline |"):
            assert told not in text, (place, told)
        assert "are left out: no noise covers them" in text
    first = (result.folder / "stages" / "first" / "model" / CARD).read_text("utf-8")
    assert "* differential privacy: none" in first


@pytest.mark.parametrize("level", ["none", "example", "client"])
def test_a_clients_card_promises_nothing_of_parts_without_noise(job: Jobs, level: str) -> None:
    """At level client what is sent has noise: the card told its epsilon of layers that were trained without."""
    privacy: dict[str, Any] = {"level": level}
    if level != "none":
        pytest.importorskip("dp_accounting")
        privacy |= {"noise": 1.0, **({"single_message": True} if level == "client" else {})}
    labels = {"labels": ["eye", "heart", "kidney"]}
    result = fedstrata.run(job("fedsplitbert", "classify", method={"rounds": 1}, privacy=privacy, task=labels))
    text = (result.folder / "clients" / "client-1" / "model" / CARD).read_text("utf-8")
    assert ("* differential privacy of what the client sent: {" in text) is (level == "client")
    assert ("* differential privacy: {" in text) is (level == "example")
    assert ("The parts that the client keeps were trained without noise" in text) is (level == "client")


def test_the_name_of_a_class_is_a_text_in_a_card(job: Jobs, tmp_path: Path) -> None:
    names = [f"{END}<img src=x>", "[a](b)\n## Own"]
    rows = [{"text": text, "label": names[i % 2]} for i, (text, _) in enumerate(SENTENCES)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows_of = dict.fromkeys(("train", "test"), str(tmp_path / "rows.jsonl"))
    made = fedstrata.run(job("fedavg", "classify", 1, data=rows_of, method={"rounds": 1}))
    assert made.model_folder is not None
    card = (made.model_folder / "README.md").read_text("utf-8")
    assert card.count(END) == 1
    assert "<img" not in card
    assert "\n## Own" not in card
    assert "\\[a\\](b) ## Own" in card


def test_a_clients_card_keeps_what_it_said_of_the_client(job: Jobs) -> None:
    made = job("fedsplitbert", "classify")
    result = fedstrata.run(made)
    text = (result.folder / "clients" / "client-1" / "model" / CARD).read_text("utf-8")
    assert text.startswith("---\n")
    assert "The model of the client client-1." in text
    again = fedstrata.run(made, resume=True)
    assert (again.folder / "clients" / "client-1" / "model" / CARD).read_text("utf-8") == text


def test_a_clients_card_has_the_score_of_its_own_model(job: Jobs) -> None:
    result = fedstrata.run(job("fedsplitbert", "classify", train={"learning_rate": 0.01}))
    losses = {client: record["score"]["loss"] for client, record in result.clients.items()}
    assert len({round(loss, 4) for loss in losses.values()}) == 3
    for client, loss in losses.items():
        card = huggingface_hub.ModelCard.load(result.folder / "clients" / client / "model" / CARD)
        assert f"| loss | {loss:.4f} | {result.score['loss']:.4f} |" in card.text
        scores = {one.metric_type: one.metric_value for one in card.data.eval_results}
        assert scores["loss"] == pytest.approx(loss, abs=1e-6)
        assert "| metric | this model | mean of all clients' models |" in card.text


@pytest.mark.parametrize(("method", "stayed"), [("centralized", False), ("single", True), ("fedavg", True)])
def test_a_card_says_whether_the_text_stayed_at_the_clients(job: Jobs, method: str, stayed: bool) -> None:
    result = fedstrata.run(job(method, method={"rounds": 1}))
    assert result.model_folder is not None
    text = (result.model_folder / CARD).read_text("utf-8")
    assert ("trained with FedStrata by clients whose text stayed with them." in text) is stayed
    assert ("in one place that held the rows of all clients" in text) is not stayed


def test_stages_stand_in_the_card_of_the_last_model(job: Jobs, model_folder: Callable[..., Path]) -> None:
    made = job("fedbt", "mlm", method={"rounds": 1})
    made["stages"] = [{"name": "pretrain"}, {"name": "finetune", "task": {"kind": "classify"}}]
    result = fedstrata.run(made)
    assert result.model_folder is not None
    text = (result.model_folder / CARD).read_text("utf-8")
    assert "method: fedbt → fedbt, 1 round and 1 round" in text
    assert text.count("## Scores") == 1


def test_a_result_says_what_it_was_made_with(job: Jobs) -> None:
    made = job("fedavg", method={"rounds": 1}, output={"keep_state": True})
    result = fedstrata.run(made)
    [first] = json.loads((result.folder / "result.json").read_text("utf-8"))["environment"]
    assert first["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert first["python"] == platform.python_version()
    assert first["machine"]["cores"] >= 1
    assert first["date"].endswith("+00:00")
    assert platform.node() not in json.dumps(first), "not the machine's name"
    more = fedstrata.run(made, {"method.rounds": 2}, resume=True)
    entries = json.loads((more.folder / "result.json").read_text("utf-8"))["environment"]
    assert entries[0] == first
    assert len(entries) == 2


def test_the_card_of_a_stage_names_the_stage_that_it_began_with(job: Jobs) -> None:
    """It said "a new model from a config", whose license holds."""
    made = job("fedavg", "classify", method={"rounds": 1})
    made["stages"] = [{"name": "first"}, {"name": "second"}]
    result = fedstrata.run(made)
    text = (result.folder / "stages" / "second" / "model" / CARD).read_text("utf-8")
    assert "* start model: the model of stage 'first'; its license" in text
    assert "new model from a config" not in text
    assert "the model of stage" not in (result.folder / "model" / CARD).read_text("utf-8")


def test_a_folder_beside_the_job_is_no_model_of_the_hub(
    job: Jobs, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Called elsewhere, its name was taken for an id of the hub."""
    made = job("fedavg", "classify", method={"rounds": 1}, model={"name": "bert-tiny"})
    (tmp_path / "jobs").mkdir()
    model_folder(head="none").rename(tmp_path / "jobs" / "bert-tiny")
    (tmp_path / "jobs" / "job.toml").write_text(tomli_w.dumps(made), "utf-8")
    result = fedstrata.run(tmp_path / "jobs" / "job.toml")
    assert result.model_folder is not None
    card = huggingface_hub.ModelCard.load(result.model_folder / CARD)
    assert card.data.base_model is None
    assert "start model: bert-tiny" in card.text


def test_the_card_of_a_kind_of_task_of_ones_own_loads_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASK_KINDS, "own", TaskKind("tag", "AutoModelForTokenClassification", {}))
    assert "AutoModelForTokenClassification.from_pretrained(folder)" in card._loading("own", "")
    assert "AutoModelForSequenceClassification.from_pretrained(folder)" in card._loading("another", "")
