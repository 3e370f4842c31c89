"""Pairs and numbers: what the model is given, the loss, and scores worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fedstrata
from fedstrata.data.tokens import tokenize
from fedstrata.errors import UserError
from fedstrata.job.metrics import REGRESSION, Predictions
from fedstrata.job.metrics import scores as scores_of
from fedstrata.models.checkpoints import parts_of
from fedstrata.tasks import Examples
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.regress import Regress
from tiny import SENTENCES, model_of, tiny_model, tokenizer

CLS, SEP = 2, 3
FIRST = ["the kidney", "the heart pumps blood", "the eye"]
SECOND = ["a stone in the kidney", "the eye", "the lens of the eye"]
Jobs = Callable[..., dict[str, Any]]


def scores(truth: Any, guess: Any) -> dict[str, float]:
    return scores_of(REGRESSION, Predictions(truth, guess))


def bert_tokenizer() -> Any:
    """The tiny tokenizer with BERT's form of a pair."""
    from tokenizers.processors import TemplateProcessing

    made = tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return made


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def pairs(most: int = 32, made: Any = None) -> Any:
    return tokenize(FIRST, made or bert_tokenizer(), most, "truncate", seconds=SECOND)


def test_a_pair_is_one_example_with_two_types() -> None:
    made = pairs()
    one, two = ids(FIRST[0]), ids(SECOND[0])
    assert made[0].tolist() == [CLS, *one, SEP, *two, SEP]
    assert made.types[: made.offsets[1]].tolist() == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    assert made.rows.tolist() == [0, 1, 2]
    assert pairs()[1].tolist() == made[1].tolist(), "again, from the cache"
    other = tokenize(FIRST, bert_tokenizer(), 32, "truncate", seconds=SECOND[::-1])
    assert other[0].tolist() != made[0].tolist()


def test_the_longer_text_of_a_pair_is_cut() -> None:
    made = pairs(most=9)
    assert made.lengths.max() <= 9
    assert made[1].tolist() == [CLS, *ids(FIRST[1]), SEP, *ids(SECOND[1]), SEP]
    assert made[0].tolist() == [CLS, *ids(FIRST[0]), SEP, *ids(SECOND[0])[:4], SEP]


def test_models_without_types_get_none() -> None:
    plain = bert_tokenizer()
    plain.model_input_names = ["input_ids", "attention_mask"]
    assert len(pairs(made=plain).types) == 0


def test_a_batch_of_pairs_is_what_the_tokenizer_itself_would_make() -> None:
    batch = Classify(0, ("no", "yes"), kind="pair").batch(
        Examples(pairs(), np.asarray([0, 1, 0])), np.arange(3), np.random.default_rng(0)
    )
    expected = bert_tokenizer()(FIRST, SECOND, padding=True, return_tensors="pt")
    assert batch.inputs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert batch.inputs[name].equal(tensor), name


def test_loss_of_numbers_is_the_mean_square() -> None:
    model = tiny_model(head="regress", num_labels=1).eval()
    labels = np.asarray([0.5, 2.0, 5.0])
    task = Regress(0)
    batch = task.batch(Examples(pairs(), labels), np.asarray([2, 0]), np.random.default_rng(0))
    with torch.inference_mode():
        guess = model(**batch.inputs).logits[:, 0].double().numpy()
        loss = float(task.loss(model, batch))
    assert loss == pytest.approx(np.mean((guess - labels[[2, 0]]) ** 2), rel=1e-5)


def test_correlations_by_hand() -> None:
    truth, guess = np.asarray([1.0, 2.0, 3.0, 4.0]), np.asarray([1.0, 3.0, 2.0, 5.0])
    made = scores(truth, guess)
    assert made["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    covariance = np.mean(truth * guess) - truth.mean() * guess.mean()
    assert made["pearson"] == pytest.approx(covariance / truth.std() / guess.std())
    assert made["loss"] == pytest.approx((0 + 1 + 1 + 1) / 4)
    assert scores(truth, np.ones(4))["pearson"] == scores(truth, np.ones(4))["spearman"] == 0.0
    one = np.float32(2.857) + np.float32(2**-22) * truth.astype(np.float32)
    assert len(set(one)) > 1, "one number, but for its last bits"
    assert scores(truth, one)["pearson"] == scores(truth, one)["spearman"] == 0.0
    assert scores(truth, 2.857 + 1e-4 * truth)["pearson"] == pytest.approx(1)


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    lines = ["one\ttwo\tlabel\tscore"]
    for i, (text, organ) in enumerate(SENTENCES):
        other, second = SENTENCES[(i + 3) % len(SENTENCES)]
        lines.append(f"{text}\t{other}\t{'same' if organ == second else 'not'}\t{5.0 if organ == second else 0.5}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("method", ["fedavg", "fedbt", "fedsplitbert"])
@pytest.mark.parametrize("kind", ["pair", "regress"])
def test_whole_runs(job: Jobs, sheet: Path, tmp_path: Path, kind: str, method: str) -> None:
    label = "label" if kind == "pair" else "score"
    data = {"train": str(sheet), "test": str(sheet), "text": ["one", "two"], "label": label}
    made = job(method, kind, 3, data=data)
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    assert result.score.keys() >= ({"accuracy", "f1"} if kind == "pair" else {"pearson", "spearman", "loss"})
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    assert forecast["clients"]["train_flops"] == result.flops
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_of(result))
    assert model.config.num_labels == (2 if kind == "pair" else 1)
    split = json.loads((tmp_path / "run" / "partition.json").read_text())
    labels = {label for client in split["clients"].values() for label in client["labels"]}
    assert labels == ({"same", "not"} if kind == "pair" else {"0.5", "5"})


@pytest.mark.parametrize("architecture", ["roberta", "distilbert", "electra", "modernbert"])
def test_models_take_pairs_with_or_without_types(
    job: Jobs, sheet: Path, model_folder: Callable[..., Path], architecture: str
) -> None:
    data = {"train": str(sheet), "test": str(sheet), "text": ["one", "two"]}
    made = job("fedavg", "pair", 3, data=data, method={"rounds": 1})
    made["model"]["name"] = str(model_folder(architecture))
    assert fedstrata.run(made).status == "finished"


def test_numbers_are_learnt(job: Jobs, sheet: Path) -> None:
    data = {"train": str(sheet), "test": str(sheet), "text": "one", "label": "score"}
    made = job("centralized", "regress", 3, data=data)
    made["train"] |= {"learning_rate": 3e-3, "epochs": 30, "dropout": False}
    assert fedstrata.run(made).score["loss"] < 3, "4.5 is what the mean alone reaches"


def test_one_output_for_numbers(model_folder: Callable[..., Path]) -> None:
    parts = parts_of(str(model_folder()), "regress")
    assert parts.shapes["head"] == {"classifier.weight": (1, 32), "classifier.bias": (1,)}


@pytest.mark.parametrize(
    ("kind", "data", "sentence"),
    [
        ("pair", {"text": "one"}, "'pair' reads two columns, found 1"),
        ("regress", {"text": ["one", "two", "one"]}, "'regress' reads one column or two columns, found 3"),
        ("regress", {"text": "one", "label": "label"}, "could not convert string to float"),
    ],
)
def test_a_mistake_is_one_sentence(job: Jobs, sheet: Path, kind: str, data: dict[str, Any], sentence: str) -> None:
    made = job("fedavg", kind, 3, data={"train": str(sheet), "test": str(sheet), **data})
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(made)
