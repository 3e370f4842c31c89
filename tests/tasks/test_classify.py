"""Classification: batches, loss, and scores against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.data.tokens import tokenize
from fedstrata.errors import UserError
from fedstrata.job.metrics import CLASSIFICATION, Predictions
from fedstrata.job.metrics import scores as scores_of
from fedstrata.plan.messages import Positions
from fedstrata.tasks import Batch, Examples
from fedstrata.tasks.classify import Classify, positive_classes
from tiny import CONFIGS, SENTENCES, tiny_model, tokenizer

LABELS = ("eye", "heart", "kidney")
SENTIMENT = ("NEG", "NEU", "POS")


def examples() -> Examples:
    tokens = tokenize([text for text, _ in SENTENCES], tokenizer(), 32, "truncate")
    return Examples(tokens, np.asarray([LABELS.index(label) for _, label in SENTENCES]))


def batch(index: list[int], width: int | None = None) -> Batch:
    return Classify(0, LABELS).batch(examples(), np.asarray(index), np.random.default_rng(0), width)


def scores(truth: Any, guess: Any, labels: tuple[str, ...], positive: tuple[str, ...] = ()) -> dict[str, float]:
    return scores_of(CLASSIFICATION, Predictions(truth, guess, labels=labels, positive=positive))


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(values, dtype=np.int64)


def test_a_batch_is_padded_and_masked() -> None:
    made = batch([4, 0])
    first, second = examples().tokens[4], examples().tokens[0]
    assert len(first) < len(second)
    width = len(second)
    assert made.inputs["input_ids"].tolist() == [[*first.tolist(), *[0] * (width - len(first))], second.tolist()]
    assert made.inputs["attention_mask"].sum(1).tolist() == [len(first), len(second)]
    assert made.inputs["attention_mask"][0, : len(first)].all()
    assert made.targets.tolist() == [1, 2]
    assert made.positions is None
    assert made.work == Positions(2 * width, 2 * width**2, 2)
    assert batch([4, 0], 32).inputs["input_ids"].shape == (2, 32)
    assert batch([4, 0], 32).work == Positions(64, 2 * 32**2, 2)


def test_padding_is_not_read_off_the_ids() -> None:
    """A text may hold the padding token; it is attended to all the same."""
    made = Examples(tokenize(["the [PAD] heart"], tokenizer(), 32, "truncate"), ints(0))
    assert 0 in made.tokens[0]
    one = Classify(0, LABELS).batch(made, ints(0), np.random.default_rng(0))
    assert one.inputs["attention_mask"].all()


def test_a_batch_draws_nothing() -> None:
    rng = np.random.default_rng(0)
    Classify(0, LABELS).batch(examples(), ints(0, 1), rng)
    assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_loss_is_hugging_faces_own(architecture: str) -> None:
    model = tiny_model(architecture, "classify", num_labels=3, initializer_range=0.5).eval()
    made = batch(list(range(12)))
    theirs = model(**made.inputs, labels=made.targets).loss
    ours = Classify(0, LABELS).loss(model, made)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert ours.requires_grad


def test_the_score_is_over_examples_and_not_batches() -> None:
    model = tiny_model(head="classify", num_labels=3, initializer_range=0.5).eval()
    task = Classify(0, LABELS, ("eye",))
    index = [[0, 1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11]]
    with torch.no_grad():
        found = task.score(model, [batch(part) for part in index])
        logits = [model(**batch([i]).inputs).logits[0].log_softmax(0) for i in range(12)]
    truth = examples().labels
    assert truth is not None
    guess = np.asarray([int(row.argmax()) for row in logits])
    assert len(set(guess.tolist())) > 1
    losses = [-float(row[label]) for row, label in zip(logits, truth, strict=True)]
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert found["accuracy"] == pytest.approx(np.mean(guess == truth))
    f1 = [by_hand(truth.tolist(), guess.tolist(), i) for i in range(3)]
    assert found["macro_f1"] == pytest.approx(np.mean(f1))
    assert found["f1"] == pytest.approx(f1[0])
    assert found.keys() == {"accuracy", "macro_f1", "matthews", "f1", "loss"}


def by_hand(truth: list[int], guess: list[int], label: int) -> float:
    """2 TP / (2 TP + FP + FN); 0 for a class that nobody has or predicts."""
    tp = sum(t == g == label for t, g in zip(truth, guess, strict=True))
    wrong = sum((t == label) != (g == label) for t, g in zip(truth, guess, strict=True))
    return 2 * tp / (2 * tp + wrong) if tp + wrong else 0.0


def test_scores_by_hand() -> None:
    """NEG: 2 of 3 found, 1 false; NEU: 1 of 2 found, 1 false; POS: all 2 found, 1 false."""
    truth = ints(0, 0, 0, 1, 1, 2, 2)
    guess = ints(0, 0, 1, 1, 2, 2, 2)
    found = scores(truth, guess, SENTIMENT, ("NEG", "POS"))
    neg, neu, pos = 2 * 2 / (2 * 2 + 0 + 1), 2 * 1 / (2 * 1 + 1 + 1), 2 * 2 / (2 * 2 + 1 + 0)
    assert found["accuracy"] == pytest.approx(5 / 7)
    assert found["macro_f1"] == pytest.approx((neg + neu + pos) / 3)
    assert found["f1"] == pytest.approx((neg + pos) / 2)  # F1^PN: without the neutral class
    # s = 7, c = 5, t = (3, 2, 2), p = (2, 2, 3): (5*7 - 16) / sqrt((49 - 17) (49 - 17))
    assert found["matthews"] == pytest.approx((35 - 16) / 32)


def test_binary_scores_by_hand() -> None:
    """TP 2, FP 1, FN 1, TN 3."""
    found = scores(ints(1, 1, 1, 0, 0, 0, 0), ints(1, 1, 0, 1, 0, 0, 0), ("no", "yes"), ("yes",))
    assert found["f1"] == pytest.approx(2 / 3)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 3 / 4) / 2)
    assert found["matthews"] == pytest.approx((2 * 3 - 1 * 1) / math.sqrt(3 * 3 * 4 * 4))


def test_f1_goes_by_name_and_not_by_place() -> None:
    truth, guess = ints(0, 0, 1, 2), ints(0, 1, 1, 2)
    one = scores(truth, guess, SENTIMENT, ("NEG",))["f1"]
    other = scores(truth, guess, SENTIMENT, ("POS",))["f1"]
    assert (one, other) == (pytest.approx(2 / 3), 1.0)


def test_f1_is_left_out_where_no_class_is_positive() -> None:
    assert scores(ints(0, 1), ints(0, 1), SENTIMENT).keys() == {"accuracy", "macro_f1", "matthews"}


def test_a_class_that_nobody_has_or_predicts_counts_as_zero() -> None:
    found = scores(ints(0, 0, 1), ints(0, 0, 1), SENTIMENT, ("POS",))
    assert found["accuracy"] == 1.0
    assert found["macro_f1"] == pytest.approx(2 / 3)
    assert found["f1"] == 0.0


def test_a_class_that_is_never_right_counts_as_zero() -> None:
    found = scores(ints(0, 0, 1, 1), ints(0, 0, 2, 2), SENTIMENT)
    assert found["macro_f1"] == pytest.approx(1 / 3)
    assert found["matthews"] == pytest.approx((2 * 4 - (2 * 2)) / math.sqrt((16 - 8) * (16 - 8)))


def test_guessing_one_class_only() -> None:
    found = scores(ints(0, 1, 0, 1), ints(0, 0, 0, 0), ("no", "yes"), ("yes",))
    assert found == {"accuracy": 0.5, "macro_f1": pytest.approx(1 / 3), "matthews": 0.0, "f1": 0.0}


def test_matthews_is_minus_one_where_everything_is_wrong() -> None:
    assert scores(ints(0, 1, 1), ints(1, 0, 0), ("a", "b"))["matthews"] == pytest.approx(-1)


@pytest.mark.parametrize(
    ("labels", "chosen", "wanted", "found"),
    [
        (("no", "yes"), None, False, ("yes",)),
        (("no", "yes"), None, True, ("yes",)),
        (("no", "yes"), ["no"], True, ("no",)),
        (SENTIMENT, None, False, ()),
        (SENTIMENT, ["NEG", "POS"], True, ("NEG", "POS")),
        (SENTIMENT, ["POS"], False, ("POS",)),
    ],
)
def test_positive_classes(
    labels: tuple[str, ...], chosen: list[str] | None, wanted: bool, found: tuple[str, ...]
) -> None:
    assert positive_classes(labels, chosen, wanted) == found


class Labels(tuple[str, ...]):
    """Class names that nobody looks through once for each positive one."""

    def __contains__(self, name: object) -> bool:
        raise AssertionError

    index: Any = __contains__


def test_many_positive_classes_of_many_are_found_at_once() -> None:
    """A job of a server, which names one class 100,000 times, kept a site busy for a minute with each message."""
    labels = Labels(f"class-{i}" for i in range(10_000))
    chosen = [labels[-1]] * 90_000
    assert len(positive_classes(labels, chosen, False)) == 90_000
    last = np.asarray([len(labels) - 1])
    assert scores(last, last, labels, tuple(chosen))["f1"] == 1.0


def test_a_positive_class_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[task\] positive: 'NEGG' is not a class; did you mean 'NEG'\?"):
        positive_classes(SENTIMENT, ["POS", "NEGG"], False)


def test_f1_of_many_classes_needs_a_choice() -> None:
    with pytest.raises(UserError, match=r"\[task\] positive: metric 'f1' needs.*expected one of: NEG, NEU, POS"):
        positive_classes(SENTIMENT, None, True)
