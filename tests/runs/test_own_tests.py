"""Clients that test on rows of their own: which rows, whose model, and what the score is the mean of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fedstrata
from fedstrata.data.prepare import own_tests, prepare
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.plan.streams import Streams
from fedstrata.reports.runs import load_run
from fedstrata.reports.summary import client_sentences, summary
from fedstrata.reports.tables import result_rows

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def own(job: Jobs) -> Callable[..., dict[str, Any]]:
    def make(name: str, **tables: Any) -> dict[str, Any]:
        made = job(name, "classify", 3, **tables)
        del made["data"]["test"]
        made["clients"] |= {"test": 0.5}
        made["train"] |= {"learning_rate": 0.01}
        return made

    return make


def test_each_client_keeps_a_share_of_its_own_rows(own: Callable[..., dict[str, Any]]) -> None:
    data = prepare(load(own("fedavg"))[0])
    assert data.tests is not None
    assert data.tests.keys() == data.shards.keys()
    for client, rows in data.tests.items():
        assert len(rows) == len(data.shards[client]) == 2
        assert not set(rows) & set(data.shards[client])
    everything = np.concatenate([*data.tests.values(), *data.shards.values()])
    assert sorted(everything) == list(range(12))
    again = prepare(load(own("centralized"))[0]).tests
    assert again is not None
    assert all((again[client] == rows).all() for client, rows in data.tests.items()), "the same for every method"


def plain_scores(model: Path, made: dict[str, Any], client: str) -> dict[str, float]:
    """Accuracy and loss of a saved model on a client's own test rows, text by text."""
    data = prepare(load(made)[0])
    assert data.tests is not None
    assert data.labels is not None
    bert = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    losses, right = [], []
    for row in data.tests[client]:
        text, label = (data.train.columns[name][row] for name in ("text", "label"))
        with torch.inference_mode():
            logits = bert(**tokenizer(text, return_tensors="pt")).logits[0]
        wanted = data.labels.index(label)
        losses.append(-float(logits.log_softmax(-1)[wanted]))
        right.append(int(logits.argmax()) == wanted)
    return {"loss": fmean(losses), "accuracy": fmean(right)}


def same(score: dict[str, float], expected: dict[str, float]) -> None:
    assert score["accuracy"] == expected["accuracy"]
    assert score["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["fedavg", "centralized", "none"])
def test_one_model_is_scored_on_every_clients_rows(own: Callable[..., dict[str, Any]], name: str) -> None:
    made = own(name)
    result = fedstrata.run(made)
    scores = {client: told["score"] for client, told in result.clients.items() if told["score"]}
    assert scores.keys() == {"client-0", "client-1", "client-2"}
    for client, score in scores.items():
        same(score, plain_scores(result.model_folder, made, client))
    for metric, value in result.score.items():
        assert value == pytest.approx(fmean(score[metric] for score in scores.values()))


@pytest.mark.parametrize("name", ["fedsplitbert", "local"])
def test_each_clients_model_is_scored_on_its_own_rows(own: Callable[..., dict[str, Any]], name: str) -> None:
    made = own(name)
    result = fedstrata.run(made)
    for client, told in result.clients.items():
        same(told["score"], plain_scores(result.folder / "clients" / client / "model", made, client))


def test_a_single_clients_model_is_scored_on_everybodys_rows(own: Callable[..., dict[str, Any]]) -> None:
    made = own("single")
    result = fedstrata.run(made)
    assert [client for client, told in result.clients.items() if told["examples"]] == ["client-0"]
    assert len(result.clients) == 3
    for client, told in result.clients.items():
        same(told["score"], plain_scores(result.model_folder, made, client))


@pytest.mark.parametrize(("name", "who", "examples"), [("centralized", "all", 6), ("single", "client-0", 2)])
def test_who_only_tests_is_no_client_that_missed_the_training(
    own: Callable[..., dict[str, Any]], name: str, who: str, examples: int
) -> None:
    """With all rows in one place, a page told of 1 of 4 clients, and that the others took part in no round."""
    run = load_run(fedstrata.run(own(name)).folder)
    assert result_rows([run])[0]["clients"] == 1
    assert summary(run).startswith(f"1 client with {examples} examples trained")
    first, *others = client_sentences(run)
    assert first.startswith(f"{who} trained on {examples} examples in 2 rounds")
    for sentence in others:
        assert "holds test rows of its own, on which the model is scored. Its own score is accuracy" in sentence


def test_the_report_tells_the_spread(own: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    fedstrata.run(own("fedavg"))
    split = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert split["tests"] == {"client-0": 2, "client-1": 2, "client-2": 2}
    assert split["test"] == 6
    page = fedstrata.report(tmp_path / "run").read_text("utf-8")
    assert "mean and standard deviation over the clients" in page


def test_a_mistake_is_one_sentence(own: Callable[..., dict[str, Any]], sentences_csv: Path) -> None:
    made = own("fedavg")
    with pytest.raises(UserError, match=r"\[clients\] test: .* so \[data\] test must go"):
        fedstrata.run(made, {"data.test": str(sentences_csv)})
    with pytest.raises(UserError, match="client-0 has 1 row, too few"):
        own_tests(0.2, {"client-0": np.asarray([3])}, Streams(0))


def test_pools_are_scored_apart(job: Jobs, tmp_path: Path) -> None:
    """As MNLI's matched and mismatched rows: each pool's scores are those of a run that tests on it alone."""
    halves = {"near": tmp_path / "near.csv", "far": tmp_path / "far.csv"}
    whole = (tmp_path / "sentences.csv").read_text("utf-8").splitlines()
    for i, path in enumerate(halves.values()):
        path.write_text("\n".join([whole[0], *whole[1 + i :: 2]]) + "\n")
    named = {name: str(path) for name, path in halves.items()}
    made = job("fedavg", "classify", 3, data={"test": named}, output={"dir": str(tmp_path / "both")})
    both = fedstrata.run(made)
    assert both.score.keys() == {
        *(
            metric + pool
            for metric in ("accuracy", "macro_f1", "matthews", "loss")
            for pool in ("", ".near", ".far")
        )
    }
    for name, path in halves.items():
        alone = job(
            "fedavg", "classify", 3, data={"test": str(path)}, output={"dir": str(tmp_path / f"run-{name}")}
        )
        score = fedstrata.run(alone).score
        assert {metric: both.score[f"{metric}.{name}"] for metric in score} == pytest.approx(score)
    assert both.score["accuracy"] == pytest.approx((both.score["accuracy.near"] + both.score["accuracy.far"]) / 2)


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("fedavg", {"wire": {"dtype": "int8"}}),
        ("fedavg", {"wire": {"codec": "delta", "bits": 1, "down_density": 0.05}}),
        ("fedbert", {"wire": {"dtype": "bf16", "activations": "fp32"}, "method": {"mode": "parallel"}}),
    ],
)
def test_the_one_model_is_saved_as_the_clients_received_and_scored_it(
    own: Callable[..., dict[str, Any]], tmp_path: Path, name: str, tables: dict[str, Any]
) -> None:
    made = own(name, **tables)
    result = fedstrata.run(made)
    made["model"], made["output"] = {"name": str(result.model_folder)}, {"dir": str(tmp_path / "again")}
    again = fedstrata.run(made | {"method": {"name": "none"}, "wire": {}})
    assert again.score == result.score, "a model that came over a coarse wire is not the server's"


def test_pools_of_clients_that_test_on_their_own_rows(own: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A pool's mean is over the clients that have rows of it."""
    whole = (tmp_path / "sentences.csv").read_text("utf-8").splitlines()
    for name, rows in (("near", whole[1:12]), ("far", whole[12:])):
        (tmp_path / f"{name}.csv").write_text("\n".join([whole[0], *rows]) + "\n")
    made = own("fedsplitbert")
    made["data"]["train"] = {name: str(tmp_path / f"{name}.csv") for name in ("near", "far")}
    made["clients"] |= {"count": 2, "partition": "iid"}
    result = fedstrata.run(made)
    each = [client["score"] for client in result.clients.values()]
    for metric, value in result.score.items():
        assert value == pytest.approx(fmean(score[metric] for score in each if metric in score))
    assert all("loss.near" in score for score in each)
    assert sum("loss.far" in score for score in each) <= 1, "a single row is at one client at most"
