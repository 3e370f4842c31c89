"""Tagging: files of words and tags, their tokens, loss and entity scores against values worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

import fedstrata
from fedstrata.data import read as reading
from fedstrata.data.forms.how import How
from fedstrata.data.read import WORD_END, Rows
from fedstrata.data.tokens import Tokens, tokenize
from fedstrata.errors import UserError
from fedstrata.job.metrics import TAGGING, Predictions
from fedstrata.job.metrics import scores as scores_of
from fedstrata.models import checkpoints
from fedstrata.plan.messages import Positions
from fedstrata.tasks import Examples
from fedstrata.tasks.batches import IGNORE_INDEX
from fedstrata.tasks.tag import Tag, whole_texts
from fedstrata.tasks.task import Predicted
from tiny import SENTENCES, tiny_model, tokenizer

LABELS = ("B-organ", "I-organ", "O")
FILE = """-DOCSTART-\tO

The\tO
kidney\tB-organ
wall\tI-organ
.\tO

The\tO
eye\tB-organ
"""
Jobs = Callable[..., dict[str, Any]]


def scores(truth: list[list[str]], guess: list[list[str]]) -> dict[str, float]:
    return scores_of(TAGGING, Predictions(truth, guess))


def read(source: Path, columns: list[str], limit: int | None = None, names: list[str] | None = None) -> Rows:
    return reading.read(str(source), How(tuple(columns), words=True, names=names), limit)


def sentence(*words: str) -> str:
    return WORD_END.join(words)


@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.conll", "a.iob2"])
@pytest.mark.parametrize("between", ["\t", " "])
def test_words_and_tags_line_by_line(tmp_path: Path, name: str, between: str) -> None:
    path = tmp_path / name
    path.write_text(FILE.replace("\t", between), "utf-8")
    rows = read(path, ["text", "label"])
    assert rows.columns == {
        "text": [sentence("The", "kidney", "wall", "."), sentence("The", "eye")],
        "label": [sentence("O", "B-organ", "I-organ", "O"), sentence("O", "B-organ")],
    }
    assert len(read(path, ["text"])) == 2
    assert len(read(path, ["text", "label"], limit=1)) == 1
    folder = read(tmp_path, ["text", "label"])
    assert folder.columns == rows.columns


def test_columns_between_word_and_tag_are_skipped_or_named(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("The DT I-NP O\neye NN I-NP B-organ\n", "utf-8")
    assert read(path, ["text", "label"]).columns["label"] == [sentence("O", "B-organ")]
    named = read(path, ["w", "chunk"], names=["w", "pos", "chunk", "ner"])
    assert named.columns == {"w": [sentence("The", "eye")], "chunk": [sentence("I-NP", "I-NP")]}


def test_lists_in_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"tokens": ["The", "eye"], "tags": ["O", "B-organ"]}) + "\n", "utf-8")
    rows = read(path, ["tokens", "tags"])
    assert rows.columns == {"tokens": [sentence("The", "eye")], "tags": [sentence("O", "B-organ")]}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.tsv", "The\tO\neye\n", "line 2: found 'eye', expected a word and its tag"),
        ("a.tsv", "The\tO\neye\tNN\tO\n", "line 2: found 'eye\\tNN\\tO'"),
        ("a.jsonl", '{"text": ["a", "b"], "label": ["O"]}', "line 1: columns text, label hold different numbers"),
        ("a.jsonl", '{"text": "a b", "label": ["O", "O"]}', "column 'text' holds 'a b', expected a list of words"),
        (
            "a.jsonl",
            '{"text": "The left kidney is enlarged and has a cyst.", "label": [{"start": 9, "end": 15}]}',
            "holds 'The left kidney is enlarged and has a cyst.', expected a list of words; a text with spans of "
            "characters is not read",
        ),
        ("a.jsonl", '{"text": ["a", ""], "label": ["O", "O"]}', "column 'text' holds an empty word"),
        ("a.csv", "text,label\nThe,O\n", "has no column that numbers the sentences"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UserError) as error:
        read(tmp_path / name, ["text", "label"])
    assert words in str(error.value)


def letters() -> Any:
    """A tokenizer whose words fall into letters, so that words have several pieces."""
    first = {letter: i for i, letter in enumerate("abcdefgh", 3)}
    inside = {f"##{letter}": i + 8 for letter, i in first.items()}
    made = Tokenizer(WordPiece({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, **first, **inside}, unk_token="[PAD]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")


def pieces(texts: list[str], most: int, long_text: Any = "chunk") -> list[list[int]]:
    made = tokenize(texts, letters(), most, long_text, WORD_END)
    return [made.words[a:b].tolist() for a, b in zip(made.offsets[:-1], made.offsets[1:], strict=True)]


def test_the_first_piece_of_a_word_carries_it() -> None:
    assert pieces([sentence("ab", "c", "def"), sentence("a")], 16) == [[-1, 0, -1, 1, 2, -1, -1, -1], [-1, 0, -1]]


def test_a_cut_long_sentence_has_every_word_once() -> None:
    """Also a word that is itself cut, twice."""
    made = pieces([sentence("ab", "c", "abcdef", "g"), sentence("abcdefgh", "b")], 4)
    assert made[:5] == [[-1, 0, -1, -1], [-1, 1, 2, -1], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, 3, -1]]
    assert [word for example in made[5:] for word in example if word >= 0] == [0, 1]
    assert pieces([sentence("ab", "c", "def")], 4, "truncate") == [[-1, 0, -1, -1]]


def examples() -> Examples:
    texts = [sentence(*text.lower().rstrip(".").split(), ".") for text, _ in SENTENCES]
    tokens = tokenize(texts, tokenizer(), 32, "chunk", WORD_END)
    return Examples(tokens, np.where(tokens.words < 0, IGNORE_INDEX, tokens.words % 3))


def test_a_batch_has_a_class_for_every_word() -> None:
    made = Tag(0, LABELS).batch(examples(), np.asarray([4, 0]), np.random.default_rng(0))
    rows, width = made.inputs["input_ids"].shape
    assert made.targets.shape == (rows, width)
    first = examples().labels
    assert first is not None
    assert made.targets[1].tolist() == first[: examples().tokens.offsets[1]].tolist()
    assert (made.targets[0][made.inputs["attention_mask"][0] == 0] == IGNORE_INDEX).all()
    assert made.work == Positions(2 * width, 2 * width**2, 2 * width)


def test_loss_is_the_mean_over_words() -> None:
    """Against log-probabilities picked out one by one."""
    model = tiny_model(head="tag", num_labels=3).eval()
    made = Tag(0, LABELS).batch(examples(), np.asarray([4, 0, 7]), np.random.default_rng(0))
    loss = Tag(0, LABELS).loss(model, made).detach()
    logits = model(**made.inputs).logits.log_softmax(-1).detach()
    picked = [
        -float(logits[row, column, made.targets[row, column]])
        for row in range(3)
        for column in range(made.targets.shape[1])
        if made.targets[row, column] != IGNORE_INDEX
    ]
    assert float(loss) == pytest.approx(math.fsum(picked) / len(picked), rel=1e-5)


def test_scores_count_whole_entities() -> None:
    """Three true entities; of three found ones two are right: one has a wrong end."""
    truth = [["B-a", "I-a", "O", "B-b"], ["O", "B-a", "O"]]
    guess = [["B-a", "O", "O", "B-b"], ["O", "B-a", "O"]]
    made = scores(truth, guess)
    assert made == pytest.approx({"f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3, "accuracy": 6 / 7})
    assert scores(truth, [["O"] * 4, ["O"] * 3]) == pytest.approx(
        {"f1": 0, "precision": 0, "recall": 0, "accuracy": 3 / 7}
    )
    wrong_kind = scores([["B-a", "I-a"]], [["B-a", "I-b"]])
    assert wrong_kind["f1"] == 0


def test_without_a_word_every_score_is_0() -> None:
    """A tokenizer may drop every word of a text, such as one of blanks without width."""
    assert scores([[]], [[]]) == {"f1": 0, "precision": 0, "recall": 0, "accuracy": 0}


def test_a_sentence_is_scored_within_itself() -> None:
    """An entity at a sentence's end and one at the next one's start stay two."""
    assert scores([["B-a"], ["I-a"]], [["B-a"], ["I-a"]])["f1"] == 1
    assert scores([["B-a"], ["I-a"]], [["B-a"], ["O"]])["recall"] == 0.5


def test_score_is_over_all_words_whatever_the_batches() -> None:
    model, task, rng = tiny_model(head="tag", num_labels=3).eval(), Tag(0, LABELS), np.random.default_rng(0)
    with torch.inference_mode():
        whole = task.score(model, [task.batch(examples(), np.arange(12), rng)])
        parted = task.score(
            model, [task.batch(examples(), np.asarray(i), rng) for i in ([3, 1], [0, 2], range(4, 12))]
        )
    assert whole == pytest.approx(parted, rel=1e-5)
    assert whole.keys() == {"f1", "precision", "recall", "accuracy", "loss"}


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_a_byte_level_tokenizer_takes_words(model_folder: Callable[..., Path], kind: str) -> None:
    """Words of a list stand alone, as after a blank."""
    folder = model_folder(kind)
    loaded = checkpoints.load(str(folder), "tag", LABELS, 0)
    made = tokenize([sentence("the", "eye")], loaded.tokenizer, 16, "chunk", WORD_END)
    assert made.words.tolist() == [-1, 0, 1, -1]
    assert loaded.parts.names[-1] == "head"
    assert loaded.fresh == ("head",)


@pytest.mark.parametrize("method", ["fedavg", "fedbt", "fedbfpt"])
def test_a_whole_run(job: Jobs, tmp_path: Path, method: str) -> None:
    path = tmp_path / "tags.conll"
    lines = []
    for text, organ in SENTENCES:
        lines += [f"{word}\t{'B-organ' if organ in word else 'O'}" for word in text.rstrip(".").split()] + [""]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    made = job(method, "tag", 3, data={"train": str(path), "test": str(path)})
    made["train"] |= {"learning_rate": 0.01, "epochs": 10}
    made["clients"] |= {"partition": "dirichlet"}
    result = fedstrata.run(made)
    assert result.score["loss"] < 0.5
    assert result.score["accuracy"] > 0.8
    split = json.loads((tmp_path / "run" / "partition.json").read_text())
    held = [client["labels"] for client in split["clients"].values()]
    assert {name for labels in held for name in labels} == {"organ"}, "the types of their entities"
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.label2id == {"B-organ": 0, "O": 1}


def test_tokens_without_words_have_none() -> None:
    made = tokenize(["the eye"], tokenizer(), 8, "chunk")
    assert isinstance(made, Tokens)
    assert len(made.words) == 0


def test_entities_are_scored_in_whole_texts_however_they_are_chunked() -> None:
    """Chunks come in the order of their lengths, and an entity may go on in the next one."""
    found = [
        Predicted([["I-organ", "O"], ["O"]], [["I-organ", "O"], ["O"]], origin=np.asarray([[3, 8], [5, 9]])),
        Predicted([["O", "B-organ"]], [["O", "B-organ"]], origin=np.asarray([[3, 7]])),
    ]
    assert whole_texts(found) == ([["O", "B-organ", "I-organ", "O"], ["O"]],) * 2
    made = Tag(0, LABELS).metrics(found)
    assert made["f1"] == made["precision"] == 1.0
    lost = [found[0], replace(found[1], guess=[["O", "O"]])]
    assert Tag(0, LABELS).metrics(lost)["f1"] == 0.0, "its end alone is no entity that is there"
    bare = [replace(each, origin=None) for each in found]
    assert whole_texts(bare)[0] == [["I-organ", "O"], ["O"], ["O", "B-organ"]]


@pytest.mark.parametrize("engine", [{"name": "inprocess"}, {"name": "pool", "workers": 2}], ids=str)
def test_a_run_counts_the_same_entities_at_every_length(job: Jobs, tmp_path: Path, engine: dict[str, Any]) -> None:
    words, tags = ["eye"] * 14, ["O"] * 4 + ["B-x", "I-x", "I-x", "I-x"] + ["O"] * 6
    rows = [(words, tags)] * 9
    lines = [json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines), "utf-8")
    data = {**dict.fromkeys(("train", "test"), str(tmp_path / "rows.jsonl")), "text": "tokens", "label": "tags"}
    found, said = {}, {}
    for handling, most in (("chunk", 32), ("chunk", 8), ("truncate", 11)):
        made = job("fedavg", "tag", data={**data, "long_text": handling}, engine=engine)
        made["train"] |= {"max_tokens": most}
        made["method"]["rounds"] = 1
        made["output"] = {"dir": str(tmp_path / f"run-{most}"), "predictions": True}
        folder = fedstrata.run(made).folder
        [only] = json.loads((folder / "classes.json").read_text("utf-8"))["classes"]
        found[most] = only["examples"]
        said[most] = json.loads((folder / "result.json").read_text("utf-8"))["data"]["test_words_cut"]
    assert found == {32: 9, 8: 9, 11: 9}
    assert said[32] == said[8] == {"count": 0, "words": 126}
    assert said[11] == {"count": 45, "words": 126}


def test_a_batch_without_a_word_of_its_own_has_nothing_to_learn() -> None:
    """As the middle of a word that is cut twice."""
    model = tiny_model("bert", "tag", num_labels=3)
    made = Tag(0, LABELS).batch(examples(), np.asarray([0]), np.random.default_rng(0))
    loss = Tag(0, LABELS).loss(model, replace(made, targets=torch.full_like(made.targets, IGNORE_INDEX)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
