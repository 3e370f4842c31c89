"""Training the word embeddings' used rows alone gives the bits of training the whole table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.client import trainer as trainer_module
from fedstrata.client import used_rows as module
from fedstrata.client.answer import ClientRuntime
from fedstrata.plan.plan import Plan
from fedstrata.tasks import Batch, Task
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from fedstrata.tasks.tag import Tag
from roles import make_runtime, sentences, train_round
from tiny import tiny_model, tokenizer

VOCABULARY = 400
INDEX = np.asarray([1, 4, 8, 9, 11])
CLASSIFY = Classify(0, ("eye", "heart", "kidney"))


@pytest.fixture(autouse=True)
def small_tables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_TABLE", 0)


def runtime(kind: str = "bert", head: str = "classify", task: Task = CLASSIFY, **train: Any) -> ClientRuntime:
    model = tiny_model(kind, head, vocab_size=VOCABULARY, **({} if head == "mlm" else {"num_labels": 3}))
    keys = {"batch_size": 2, "epochs": 3, "learning_rate": 1e-2, "weight_decay": 0.1, **train}
    return make_runtime(model, task, **keys)


def everything(made: ClientRuntime) -> Plan:
    parts = made.working.parts
    return Plan(tuple(range(parts.depth)), parts.names, parts.names)


def used(made: ClientRuntime, plan: Plan | None = None) -> int | None:
    """Rows that a round would train; None for all."""
    trained = made.working.trainable(plan or everything(made))
    task, train = made.trainer.task, made.trainer.train
    found = module.used_rows(made.working, trained, train, task, sentences(), [INDEX])
    return None if found is None else len(found[1])


def trained_weights(made: ClientRuntime) -> dict[str, torch.Tensor]:
    reply = train_round(made, everything(made), INDEX)
    weights = {name: p.detach().clone() for name, p in made.working.model.named_parameters()}
    return {**weights, "loss": torch.tensor(reply.loss)}


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "modernbert"])
@pytest.mark.parametrize("schedule", ["constant", "polynomial"])
def test_the_same_bits_as_with_the_whole_table(kind: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runtime(kind, lr_schedule=schedule, lr_decay=0.5)
    assert 0 < (used(made) or 0) < 60
    start = {name: p.detach().clone() for name, p in made.working.model.named_parameters()}
    found = trained_weights(made)
    table = made.working.model.get_input_embeddings()
    assert (table.num_embeddings, len(table.weight), len(table._forward_pre_hooks)) == (VOCABULARY, VOCABULARY, 0)
    monkeypatch.setattr(trainer_module, "used_rows", lambda *_: None)
    expected = trained_weights(runtime(kind, lr_schedule=schedule, lr_decay=0.5))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    name = next(name for name, p in made.working.model.named_parameters() if p is table.weight)
    still = (found[name] == start[name]).all(1) & start[name].any(1)
    assert not still.any(), "the rows without texts have decayed"


def test_a_second_round_begins_where_the_first_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runtime()
    plan = everything(made)
    trained_weights(made)
    train_round(made, plan, np.asarray([0, 2]), client="b")
    monkeypatch.setattr(trainer_module, "used_rows", lambda *_: None)
    other = runtime()
    trained_weights(other)
    train_round(other, plan, np.asarray([0, 2]), client="b")
    for one, two in zip(made.working.model.parameters(), other.working.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_table_is_whole_again_after_an_error() -> None:
    made = runtime()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_round(made, everything(made), INDEX, callback=fail)
    table = made.working.model.get_input_embeddings()
    assert (table.num_embeddings, len(table.weight), len(table._forward_pre_hooks)) == (VOCABULARY, VOCABULARY, 0)


@pytest.mark.parametrize(
    "keys", [{"optimizer": "sgd"}, {"optimizer_state": "persist"}, {"max_grad_norm": 1.0}, {"proximal_mu": 0.1}]
)
def test_the_whole_table_where_other_rows_move_or_count(keys: dict[str, Any]) -> None:
    assert used(runtime(**keys)) is None


def test_the_whole_table_where_a_decoder_is_tied_to_it_or_tokens_are_drawn() -> None:
    mlm = masked_lm(tokenizer(), VOCABULARY, 0.15, False)
    assert used(runtime(head="mlm", task=mlm)) is None
    assert used(runtime(head="mlm", task=CLASSIFY)) is None, "tied"
    assert used(runtime(task=mlm)) is None, "random tokens"


def test_the_whole_table_where_most_of_it_is_used_or_it_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runtime()
    parts = made.working.parts
    plan = Plan(tuple(range(parts.depth)), ("head",), ("head",))
    assert used(made, plan) is None
    monkeypatch.setattr(module, "LEAST_SAVED", 0.95)
    assert used(made) is None


def test_tags_too() -> None:
    assert used(runtime(head="tag", task=Tag(0, ("O", "B-x", "I-x"))))


class OwnLoss:
    """As the guide on tasks has it: the wrapped task's attributes, another loss."""

    plain = CLASSIFY

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class Shrinking(OwnLoss):
    """All rows of the table are drawn to 0, those of no text too."""

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        return CLASSIFY.loss(model, batch) + model.get_input_embeddings().weight.pow(2).mean()


class Masking(OwnLoss):
    """Hides a word of every text by a token that no text has."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        batch.inputs["input_ids"][:, 1] = tokenizer().mask_token_id
        return CLASSIFY.loss(model, batch)


@pytest.mark.parametrize("task", [Shrinking(), Masking()], ids=["reads all weights", "other tokens"])
def test_the_whole_table_under_a_loss_of_one_s_own(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained_weights(runtime(task=task))
    monkeypatch.setattr(trainer_module, "used_rows", lambda *_: None)
    expected = trained_weights(runtime(task=task))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_of_a_small_table_all_rows_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runtime()
    size = made.working.model.get_input_embeddings().weight.numel()
    monkeypatch.setattr(module, "LEAST_TABLE", size)
    assert used(made)
    monkeypatch.setattr(module, "LEAST_TABLE", size + 1)
    assert used(made) is None
