"""What goes into an optimizer step: a budget of tokens, several batches, shortened gradients."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedstrata.client.optimizer import make_optimizer
from fedstrata.client.poisson import poisson_steps, sampling
from fedstrata.client.steps import epoch_batches, examples_passed, steps
from fedstrata.job.tables import Train
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.tasks import Batch, Task
from fedstrata.tasks.batches import IGNORE_INDEX
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from fedstrata.tasks.tag import Tag
from roles import drawn_batches, make_runtime, sentences, train_request, train_round
from tiny import tiny_model, tokenizer, train_config

QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTHS = np.random.default_rng(5).integers(3, 60, 100)
RATE = 0.1
PLAIN_SGD: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0, "learning_rate": RATE}


def mlm() -> Task:
    return masked_lm(tokenizer(), len(tokenizer()), 0.15, False)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@settings(max_examples=60)
@given(
    count=st.integers(0, 30),
    epochs=st.integers(1, 4),
    limit=st.none() | st.integers(1, 30),
    accumulation=st.integers(1, 4),
    size=st.sampled_from([{"batch_size": 4}, {"tokens_per_batch": 90}, {"tokens_per_batch": 1}]),
    padding=st.sampled_from(["batch", "max"]),
)
def test_a_round_is_its_epochs_one_after_another(
    count: int, epochs: int, limit: int | None, accumulation: int, size: dict[str, Any], padding: Any
) -> None:
    lengths = LENGTHS[:count]
    train = train_config(
        epochs=epochs, steps=limit, gradient_accumulation=accumulation, padding=padding, max_tokens=64, **size
    )
    made, order = list(steps(lengths, train, rng())), rng()
    expected = []
    for epoch in range(epochs):
        batches = [batch.tolist() for batch in epoch_batches(lengths, train, order)]
        groups = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
        if epoch == 0:
            assert all(step.epoch_steps == len(groups) for step in made)
        expected += [(epoch, group) for group in groups]
    expected = expected[: limit or len(expected)]
    assert [(step.epoch, [batch.tolist() for batch in step.batches]) for step in made] == expected
    assert all(step.total == len(expected) for step in made)


def test_a_budget_counts_positions_as_they_are_padded() -> None:
    for padding, width in (("batch", None), ("max", 64)):
        train = train_config(tokens_per_batch=256, padding=padding, max_tokens=64)
        for step in steps(LENGTHS, train, rng()):
            [batch] = step.batches
            assert len(batch) * (width or LENGTHS[batch].max()) <= 256
            assert width is None or len(batch) == 4
    lone = [step.batches for step in steps(LENGTHS, train_config(tokens_per_batch=8), rng())]
    assert len(lone) > 90, "most texts alone are longer"
    assert sorted(i for [batch] in lone for i in batch.tolist()) == list(range(100))


def test_the_epochs_of_a_budget_may_differ_in_their_steps() -> None:
    """So the epoch of a step is told, and is no division."""
    train = train_config(tokens_per_batch=200, epochs=8, group_by_length=False)
    made = list(steps(LENGTHS, train, rng()))
    counts = [sum(step.epoch == epoch for step in made) for epoch in range(8)]
    assert len(set(counts)) > 1
    assert sum(counts) == len(made) == made[0].total


def plain(
    model: nn.Module, task: Task, drawn: list[list[Batch]], train: Train, rates: list[float] | None = None
) -> list[float]:
    """The reference: the loss of every prediction of a step over their number; torch's own clipping."""
    optimizer = make_optimizer(dict(model.named_parameters()), train, {})
    losses = []
    model.train()
    for i, batches in enumerate(drawn):
        for group in optimizer.param_groups:
            group["lr"] = rates[i] if rates else train.learning_rate
        counts = [predictions(batch) for batch in batches]
        losses.append(0.0)
        for batch, count in zip(batches, counts, strict=True):
            loss = task.loss(model, batch) * (count / sum(counts))
            loss.backward()
            losses[-1] += loss.item()
        if train.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def predictions(batch: Batch) -> int:
    return int((batch.targets != IGNORE_INDEX).sum())


def model_and_task(kind: str) -> tuple[nn.Module, Task]:
    names = ("eye", "heart", "kidney")
    if kind == "mlm":
        return tiny_model(**QUIET), mlm()
    return tiny_model(head=kind, num_labels=3, **QUIET), Tag(0, names) if kind == "tag" else Classify(0, names)


def examples_of(kind: str) -> Any:
    made = sentences()
    if kind != "tag":
        return made
    tags = np.asarray(made.tokens.ids, np.int64) % 3
    tags[::2] = IGNORE_INDEX
    return type(made)(made.tokens, tags)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
@pytest.mark.parametrize("kind", ["mlm", "classify", "tag"])
def test_several_batches_and_shortened_gradients_against_a_plain_loop(
    kind: str, clip: float | None, optimizer: str
) -> None:
    """To the bit: 5 batches of an epoch in steps of 3 and 2, twice, the rate decaying by epoch."""
    model, task = model_and_task(kind)
    reference = copy.deepcopy(model)
    train: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 1e-2, "max_grad_norm": clip}
    runtime = make_runtime(model, task, batch_size=3, gradient_accumulation=3, epochs=2, lr_decay=0.5, **train)
    examples, index = examples_of(kind), np.r_[0:12, 0]
    drawn = [
        [batch for _, batch in batches]
        for _, batches in runtime.trainer._steps(train_request(Plan((), ())), examples, index)
    ]
    assert [len(batches) for batches in drawn] == [3, 2, 3, 2]
    losses = plain(reference, task, drawn, runtime.trainer.train, [1e-2, 1e-2, 5e-3, 5e-3])
    told: list[float] = []
    reply = run(runtime, examples, index, told)
    assert told == losses
    assert (reply.steps, reply.loss) == (4, np.mean(losses))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["mlm", "tag"])
def test_the_mean_loss_is_that_of_the_steps_that_predict_something(kind: str) -> None:
    """Half of the texts hold nothing that can be predicted: unknown tokens, or the middle of a long word."""
    model, task = model_and_task(kind)
    reference = copy.deepcopy(model)
    runtime = make_runtime(model, task, batch_size=2, gradient_accumulation=2, group_by_length=False, **PLAIN_SGD)
    made = examples_of(kind)
    ids, tags = made.tokens.ids.copy(), made.labels.copy()
    for i in range(0, 12, 2):
        inside = slice(made.tokens.offsets[i], made.tokens.offsets[i + 1])
        ids[inside] = tokenizer().unk_token_id
        tags[inside if kind == "tag" else slice(0)] = IGNORE_INDEX
    examples = type(made)(replace(made.tokens, ids=ids), tags)
    index = np.r_[np.arange(0, 12, 2), np.arange(0, 12, 2), 1, 3]
    drawn = [
        [batch for _, batch in batches]
        for _, batches in runtime.trainer._steps(train_request(Plan((), ())), examples, index)
    ]
    full = [[batch for batch in batches if predictions(batch)] for batches in drawn]
    assert [bool(batches) for batches in full].count(False) > 0
    losses = plain(reference, task, [batches for batches in full if batches], runtime.trainer.train)
    assert run(runtime, examples, index, []).loss == pytest.approx(np.mean(losses), rel=1e-6)


def run(runtime: Any, examples: Any, index: Any, told: list[float]) -> Any:
    from fedstrata.client.model_pass import WholePass
    from fedstrata.client.trainer import drain

    plan = Plan((0, 1, 2), runtime.working.parts.names)
    request: Request = train_request(plan)
    model_pass = WholePass(runtime.working, plan)
    steps = runtime.trainer.run(
        request, examples, index, model_pass, {}, lambda _s, _t, loss, _n: told.append(loss)
    )
    return drain(steps)[0]


@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_a_step_over_several_batches_is_that_over_one_of_all(kind: str) -> None:
    """Masks differ in number from batch to batch, so the mean of their means is another one."""
    model, task = model_and_task(kind)
    whole = copy.deepcopy(model)
    runtime = make_runtime(
        model, task, batch_size=5, gradient_accumulation=3, padding="max", max_tokens=32, **PLAIN_SGD
    )
    batches = drawn_batches(runtime.trainer, np.arange(12))
    assert [len(batch.inputs["input_ids"]) for batch in batches] != [4, 4, 4]
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
    positions = (
        None if kind == "classify" else torch.cat([b.positions for b in batches if b.positions is not None])
    )
    loss = task.loss(whole, Batch(inputs, torch.cat([batch.targets for batch in batches]), positions))
    loss.backward()
    reply = train_round(runtime, Plan((0, 1, 2), runtime.working.parts.names))
    assert reply.steps == 1
    assert reply.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        expected = parameter.detach() - RATE * parameter.grad
        torch.testing.assert_close(model.get_parameter(name).detach(), expected, atol=1e-6, rtol=1e-5)


def test_the_proximal_term_is_added_once_and_shortened_too() -> None:
    mu, clip = 5.0, 0.02
    model, task = model_and_task("classify")
    reference = copy.deepcopy(model)
    runtime = make_runtime(
        model, task, batch_size=3, gradient_accumulation=2, proximal_mu=mu, max_grad_norm=clip, **PLAIN_SGD
    )
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    names = runtime.working.parts.names
    batches = drawn_batches(runtime.trainer, np.arange(12))
    reference.train()
    for pair in (batches[:2], batches[2:]):
        for batch in pair:
            (task.loss(reference, batch) / 2).backward()
        for name, p in reference.named_parameters():
            assert p.grad is not None
            p.grad += mu * (p.detach() - start[name])
        norm = torch.sqrt(sum((p.grad**2).sum() for p in reference.parameters() if p.grad is not None))
        assert norm > 2 * clip
        for p in reference.parameters():
            p.data -= RATE * p.grad * clip / norm
            p.grad = None
    train_round(runtime, Plan((0, 1, 2), names, names))
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, atol=1e-6, rtol=1e-4)


def test_a_round_of_budgeted_batches_equals_a_plain_loop() -> None:
    """Unequal batches, a rate that decays with each epoch whatever its number of steps."""
    model, task = model_and_task("classify")
    reference = copy.deepcopy(model)
    runtime = make_runtime(model, task, tokens_per_batch=26, epochs=4, lr_decay=0.5, group_by_length=False)
    examples, index = sentences(), np.arange(12)
    made = list(runtime.trainer._steps(train_request(Plan((), ())), examples, index))
    counts = [sum(step.epoch == epoch for step, _ in made) for epoch in range(4)]
    assert len(set(counts)) > 1
    rates = [5e-5 * 0.5**epoch for epoch, count in enumerate(counts) for _ in range(count)]
    drawn = [[batch for _, batch in batches] for _, batches in made]
    losses = plain(reference, task, drawn, runtime.trainer.train, rates)
    told: list[float] = []
    run(runtime, examples, index, told)
    assert told == losses
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name


def test_scoring_takes_twice_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstrata.client.model_pass import WholePass

    model, task = model_and_task("classify")
    runtime = make_runtime(model, task, tokens_per_batch=40)
    sizes: list[int] = []
    original = type(task).batch

    def counted(self: Any, *words: Any) -> Batch:
        made = original(self, *words)
        sizes.append(made.work.tokens)
        return made

    monkeypatch.setattr(type(task), "batch", counted)
    runtime.scorer.run(sentences(), None, WholePass(runtime.working, Plan((0, 1, 2), ())))
    assert 40 < max(sizes) <= 80


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.none() | st.integers(1, 9))
def test_how_many_examples_pass_is_known_before(
    count: int, epochs: int, batch_size: int, accumulation: int, most: int | None
) -> None:
    """To the example, unless steps end a round of whose batches some are smaller."""
    train = Train(epochs=epochs, batch_size=batch_size, gradient_accumulation=accumulation, steps=most)
    lengths = np.full(count, 5)
    passed = sum(len(batch) for step in steps(lengths, train, np.random.default_rng(0)) for batch in step.batches)
    told = examples_passed(count, train)
    assert passed <= told
    if most is None or count % (batch_size * accumulation) == 0:
        assert passed == told


def test_of_fewer_examples_than_a_batch_each_takes_part_in_every_noised_step() -> None:
    """The sum of their gradients is divided by their number, and not by that of a batch."""
    train = train_config(batch_size=8, epochs=3)
    assert sampling(5, train) == (1.0, 3, 1)
    made = list(poisson_steps(np.full(5, 4), train, rng()))
    assert [[chosen.tolist() for chosen in step.batches] for step in made] == [[[0, 1, 2, 3, 4]]] * 3
