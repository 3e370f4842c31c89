"""Masked language modeling: what is hidden, what it is replaced by, and the loss against Hugging Face's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedstrata
from fedstrata.data.tokens import Tokens, tokenize
from fedstrata.errors import UserError
from fedstrata.plan.messages import Positions
from fedstrata.tasks import Batch, Examples
from fedstrata.tasks.clm import CausalLM
from fedstrata.tasks.mlm import MaskedLM, masked_lm
from tiny import CONFIGS, SENTENCES, SPECIAL, tiny_model, tokenizer, words

V = len(SPECIAL) + len(words())
PAD, UNK, CLS, SEP, MASK = range(5)


def task(full: bool = False, probability: float = 0.15) -> MaskedLM:
    return masked_lm(tokenizer(), V, probability, full)


def made_of(*rows: list[int]) -> Examples:
    lengths = [len(row) for row in rows]
    ids = np.asarray([i for row in rows for i in row], dtype=np.int32)
    return Examples(Tokens(ids, np.cumsum([0, *lengths]), np.arange(len(rows))))


def sentences() -> Examples:
    return Examples(tokenize([text for text, _ in SENTENCES], tokenizer(), 32, "chunk"))


def many(rows: int = 400, width: int = 128) -> Examples:
    """A large batch of rows of many lengths: [CLS] words [SEP]."""
    rng = np.random.default_rng(1)
    return made_of(
        *([CLS, *rng.integers(5, V, int(n) - 2).tolist(), SEP] for n in rng.integers(width // 2, width + 1, rows))
    )


def batch(made: MaskedLM, examples: Examples, seed: int = 0, width: int | None = None) -> Batch:
    return made.batch(examples, np.arange(len(examples)), np.random.default_rng(seed), width)


def original(examples: Examples, width: int | None = None) -> torch.Tensor:
    width = width or int(examples.tokens.lengths.max())
    return torch.tensor([[*examples.tokens[i].tolist(), *[PAD] * width][:width] for i in range(len(examples))])


def test_the_task_of_a_tokenizer() -> None:
    made = task()
    assert (made.kind, made.mask, made.padding, made.vocabulary) == ("mlm", MASK, PAD, V)
    assert made.special.tolist() == [PAD, UNK, CLS, SEP, MASK]
    assert (made.probability, made.full_head) == (0.15, False)


def test_a_tokenizer_without_mask_token_is_refused() -> None:
    words = tokenizer()
    words.mask_token = None
    with pytest.raises(UserError, match="'mlm' needs a tokenizer with a mask token"):
        masked_lm(words, V, 0.15, False)


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_the_share_hidden_and_what_replaces_it(probability: float) -> None:
    """Of about 38,000 words, within 4 standard deviations."""
    examples = many()
    made = batch(task(probability=probability), examples)
    before, shown = original(examples), made.inputs["input_ids"]
    assert made.positions is not None
    hidden = made.positions
    words = (before >= 5).sum().item()
    assert words > 35_000
    sure = 4 * math.sqrt(probability * (1 - probability) / words)
    assert hidden.sum().item() / words == pytest.approx(probability, abs=sure)
    n = int(hidden.sum())
    masked, kept = (shown[hidden] == MASK).sum().item() / n, (shown[hidden] == before[hidden]).sum().item() / n
    other = 1 - masked - kept
    noise = 0.1 * (V - 2) / V  # a random id may be the mask or the word itself
    assert masked == pytest.approx(0.8 + 0.1 / V, abs=4 * math.sqrt(0.16 / n))
    assert kept == pytest.approx(0.1 + 0.1 / V, abs=4 * math.sqrt(0.09 / n))
    assert other == pytest.approx(noise, abs=4 * math.sqrt(0.09 / n))
    drawn = shown[hidden & (shown != before) & (shown != MASK)]
    assert {UNK, CLS, SEP, 5, V - 1} <= set(drawn.tolist())  # from the whole vocabulary
    assert drawn.max() < V


def test_what_is_not_hidden_is_shown_and_special_tokens_are_never_hidden() -> None:
    examples = many()
    made = batch(task(probability=0.9), examples, width=140)
    before, hidden = original(examples, 140), made.positions
    assert hidden is not None
    assert torch.equal(made.inputs["input_ids"][~hidden], before[~hidden])
    assert torch.equal(made.targets, before[hidden])
    assert not (hidden & (before < 5)).any()
    assert hidden[before >= 5].float().mean() > 0.85
    assert made.targets.min() >= 5


def test_targets_come_row_by_row() -> None:
    examples = made_of([CLS, 10, 11, SEP], [CLS, 20, 21, 22, SEP])
    made = batch(task(probability=0.999), examples)
    assert made.targets.tolist() == [10, 11, 20, 21, 22]
    assert made.positions is not None
    assert made.positions.nonzero().tolist() == [[0, 1], [0, 2], [1, 1], [1, 2], [1, 3]]


def test_padding_is_neither_attended_to_nor_hidden() -> None:
    examples = made_of([CLS, 10, SEP], [CLS, 20, 21, 22, SEP])
    made = batch(task(probability=0.999), examples, width=7)
    assert made.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    assert made.inputs["input_ids"][:, 5:].tolist() == [[PAD] * 2] * 2
    assert made.inputs["input_ids"].dtype == made.targets.dtype == torch.int64
    assert set(made.inputs) == {"input_ids", "attention_mask"}
    unlisted = replace(task(probability=0.999), special=np.asarray([CLS, SEP]))
    assert batch(unlisted, examples, width=7).targets.tolist() == [10, 20, 21, 22]


def test_at_least_one_position_is_hidden_and_any_may_be() -> None:
    made = task(probability=1e-9)
    examples = made_of([CLS, 10, 11, SEP], [CLS, 20, 21, 22, SEP])
    seen = [batch(made, examples, seed) for seed in range(60)]
    assert {len(one.targets) for one in seen} == {1}
    assert {int(one.targets) for one in seen} == {10, 11, 20, 21, 22}


@pytest.mark.parametrize("full", [False, True])
def test_a_batch_without_a_word_hides_nothing(full: bool) -> None:
    made = batch(task(full), made_of([CLS, UNK, SEP], [CLS, SEP]))
    assert len(made.targets) == 0
    assert made.inputs["input_ids"].tolist() == [[CLS, UNK, SEP], [CLS, SEP, PAD]]
    with torch.no_grad():
        assert task(full).score(tiny_model(), [made])["loss"] == 0.0


def test_the_same_generator_hides_the_same_and_every_call_anew() -> None:
    made, examples = task(), sentences()
    one, same, other = (batch(made, examples, seed) for seed in (3, 3, 4))
    assert torch.equal(one.inputs["input_ids"], same.inputs["input_ids"])
    assert torch.equal(one.targets, same.targets)
    assert not torch.equal(one.positions, other.positions)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    index = np.arange(len(examples))
    first, second = made.batch(examples, index, rng), made.batch(examples, index, rng)
    assert torch.equal(first.positions, one.positions)  # type: ignore[arg-type]
    assert not torch.equal(first.positions, second.positions)  # type: ignore[arg-type]


def test_the_head_counts_where_it_is_computed() -> None:
    rows, width = 12, int(sentences().tokens.lengths.max())
    masked, full = batch(task(), sentences()), batch(task(full=True), sentences())
    assert masked.work == Positions(rows * width, rows * width**2, len(masked.targets))
    assert full.work == Positions(rows * width, rows * width**2, rows * width)
    assert torch.equal(masked.targets, full.targets)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_loss_is_hugging_faces_own(architecture: str, full: bool) -> None:
    made = task(full)
    one = batch(made, sentences())
    model = tiny_model(architecture).eval()
    labels = torch.full_like(one.inputs["input_ids"], -100)
    labels[one.positions] = one.targets
    theirs = model(**one.inputs, labels=labels).loss
    ours = made.loss(model, one)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    grads: list[list[torch.Tensor]] = []
    for loss in (ours, theirs):
        model.zero_grad()
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 20
    for one_grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(one_grad, other, rtol=1e-4, atol=1e-6)


class Fixed(torch.nn.Module):
    """A model that gives chosen logits at every position."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, **_: Any) -> Any:
        return self


@pytest.mark.parametrize("full", [False, True])
def test_the_score_is_that_of_a_slow_loop(full: bool) -> None:
    """Sums are over hidden tokens: batches of unlike size must not be averaged."""
    made, examples = task(full), sentences()
    rng = np.random.default_rng(0)
    batches = [made.batch(examples, index, rng) for index in (np.arange(7), np.asarray([9]), np.asarray([7, 8]))]
    assert len({len(one.targets) for one in batches}) > 1
    model = tiny_model(initializer_range=0.5).eval()
    losses, right = [], []
    with torch.no_grad():
        found = made.score(model, batches)
        for one in batches:
            logits = model(**one.inputs).logits
            assert one.positions is not None
            for (row, column), target in zip(one.positions.nonzero().tolist(), one.targets.tolist(), strict=True):
                losses.append(-functional.log_softmax(logits[row, column], 0)[target].item())
                right.append(int(logits[row, column].argmax()) == target)
    assert found.keys() == {"loss", "perplexity", "accuracy"}
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))


def test_scores_by_hand() -> None:
    """Certain and right at two of three positions, a coin between two words at the third."""
    made = replace(task(full=True), probability=0.999)
    one = batch(made, made_of([CLS, 10, 11, 12, SEP]))
    logits = torch.full((1, 5, V), -1000.0)
    logits[0, 1, 10] = logits[0, 2, 11] = 0.0
    logits[0, 3, 5] = 1.0
    logits[0, 3, 12] = 0.0
    third = math.log(1 + math.e)
    found = made.score(Fixed(logits), [one])
    assert found["loss"] == pytest.approx(third / 3, rel=1e-5)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["perplexity"] == pytest.approx(math.exp(third / 3), rel=1e-5)


def test_perplexity_never_overflows() -> None:
    made = replace(task(full=True), probability=0.999)
    one = batch(made, made_of([CLS, 10, SEP]))
    logits = torch.zeros(1, 3, V)
    logits[..., 10] = -1e6
    found = made.score(Fixed(logits), [one])
    assert found["loss"] == pytest.approx(1e6, rel=1e-3)
    assert found["perplexity"] == math.exp(700)


def test_a_batch_on_another_device_is_the_same() -> None:
    one = batch(task(), sentences())
    moved = one.to(torch.device("meta"))
    assert moved.inputs["input_ids"].device.type == moved.targets.device.type == "meta"
    assert isinstance(moved.positions, tuple), "indices: a GPU takes them without waiting for their number"
    assert {index.device.type for index in moved.positions} == {"meta"}
    assert moved.work == one.work


@pytest.mark.parametrize("which", ["train", "test"])
def test_rows_without_a_token_to_predict_are_refused(
    job: Callable[..., dict[str, Any]], tmp_path: Path, which: str
) -> None:
    """Their score would be perfect: a loss of 0 over nothing."""
    path = tmp_path / "unknown.txt"
    path.write_text("\n".join(["\ufdfa", "\u4e2d\u6587"] * 5) + "\n", "utf-8")
    with pytest.raises(UserError, match=rf"\[data\] {which}: no token of its rows can be predicted"):
        fedstrata.run(job("fedavg", "mlm", data={which: str(path)}))


def test_one_token_alone_is_not_predicted_from_those_before() -> None:
    assert not CausalLM(PAD).has_targets(made_of([CLS], [7]))
    assert CausalLM(PAD).has_targets(made_of([CLS], [7, 8]))
