"""The learning rate over a run, and an optimizer that goes on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.client.answer import ClientData, Work, answer_request
from fedstrata.client.dropout import DropoutRng
from fedstrata.client.optimizer import (
    BLOCK,
    add_proximal,
    anchor_of,
    learning_rate,
    make_optimizer,
    memory_of,
    step,
)
from fedstrata.client.trainer import drain
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.tables import Train
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire.store import Store
from roles import drawn_batches, make_runtime, sentences, train_request, weights_of
from tiny import tiny_model, tokenizer, train_config


def rates(local: Train, spans: list[tuple[float, float]], steps: int, epoch: int = 100) -> list[float]:
    return [learning_rate(local, ScheduleSpan(steps, epoch, *span), i) for span in spans for i in range(steps)]


def test_a_constant_rate_is_constant() -> None:
    assert rates(train_config(learning_rate=3e-4), [(0.0, 0.5), (0.5, 1.0)], 4) == [3e-4] * 8


def test_warm_up_and_polynomial_go_over_the_whole_run() -> None:
    """Ten steps in two rounds, two of them warm-up: a step stands for its middle."""
    local = train_config(learning_rate=1.0, lr_schedule="polynomial", warmup_ratio=0.2)
    expected = [0.25, 0.75, *((10 - t - 0.5) / 8 for t in range(2, 10))]
    assert rates(local, [(0.0, 0.5), (0.5, 1.0)], 5) == pytest.approx(expected)
    squared = train_config(learning_rate=1.0, lr_schedule="polynomial", lr_power=2.0)
    assert rates(squared, [(0.0, 1.0)], 2) == pytest.approx([0.75**2, 0.25**2])


def test_warm_up_alone_ends_in_the_full_rate() -> None:
    local = train_config(learning_rate=2.0, warmup_ratio=0.5)
    assert rates(local, [(0.0, 1.0)], 4) == pytest.approx([0.5, 1.5, 2.0, 2.0])


def test_decay_by_epoch_comes_on_top() -> None:
    local = train_config(learning_rate=1.0, lr_schedule="polynomial", lr_decay=0.1)
    assert rates(local, [(0.0, 1.0)], 4, epoch=2) == pytest.approx([7 / 8, 5 / 8, 0.1 * 3 / 8, 0.1 / 8])


def test_an_optimizer_goes_on_from_its_memory() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    whole = copy.deepcopy(model)
    data = torch.randn(6, 4, 3)
    local = train_config(learning_rate=0.1, betas=[0.8, 0.95], epsilon=1e-4, weight_decay=0.3)
    groups = [{"params": [whole.weight]}, {"params": [whole.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.1, betas=[0.8, 0.95], eps=1e-4, weight_decay=0.3, foreach=False)
    for batch in data:
        plain.zero_grad()
        whole(batch).square().mean().backward()
        plain.step()
    memory: dict[str, torch.Tensor] = {}
    for half in (data[:3], data[3:]):
        trained = dict(model.named_parameters())
        optimizer = make_optimizer(trained, local, memory)
        for batch in half:
            model(batch).square().mean().backward()
            step(optimizer, 0.1)
        memory = memory_of(optimizer, trained)
    assert set(memory) == {f"{kind}|{name}" for kind in ("step", "exp_avg", "exp_avg_sq") for name in trained}
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=1e-5, atol=1e-6)
    fresh = make_optimizer(dict(model.named_parameters()), local, {})
    assert memory_of(fresh, dict(model.named_parameters())) == {}


def test_sgd_is_torchs_and_has_no_memory() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    whole = copy.deepcopy(model)
    groups = [{"params": [whole.weight], "weight_decay": 0.3}, {"params": [whole.bias]}]
    plain = torch.optim.SGD(groups, lr=0.1)
    trained = dict(model.named_parameters())
    optimizer = make_optimizer(trained, train_config(optimizer="sgd", learning_rate=0.1, weight_decay=0.3), {})
    for batch in torch.randn(6, 4, 3):
        plain.zero_grad()
        whole(batch).square().mean().backward()
        plain.step()
        model(batch).square().mean().backward()
        step(optimizer, 0.1)
    for name, weight in whole.named_parameters():
        assert torch.equal(trained[name], weight)
    assert not any(torch.is_tensor(value) for value in memory_of(optimizer, trained).values())


PARAMETERS = {
    "small": lambda: torch.randn(3, 5),
    "a number": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 4),
    "of several blocks": lambda: torch.randn(3, BLOCK // 2 + 7),
    "not contiguous": lambda: torch.randn(BLOCK // 2 + 7, 3).T,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_proximal_term_is_the_gradient_of_the_squared_distance(name: str) -> None:
    torch.manual_seed(0)
    parameter, resting = nn.Parameter(PARAMETERS[name]()), nn.Parameter(torch.ones(2))
    train = train_config(proximal_mu=0.25)
    anchor = anchor_of([parameter, resting], train)
    old = parameter.detach().clone()
    with torch.no_grad():
        parameter += torch.randn(parameter.shape)
    gradient = torch.randn_like(parameter)
    parameter.grad = gradient.clone()
    add_proximal(anchor, train)
    assert torch.equal(parameter.grad, gradient + 0.25 * (parameter.detach() - old))  # mu is a power of two
    assert resting.grad is None


@pytest.mark.parametrize("kept", [False, True])
def test_a_clients_optimizer_is_kept_or_begins_anew(kept: bool, tmp_path: Path) -> None:
    """Two rounds against one of two epochs: the same only where the optimizer goes on."""
    quiet: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    train = {"batch_size": 4, "learning_rate": 1e-2, "optimizer_state": "persist" if kept else "reset"}
    model = tiny_model(**quiet)
    runtime = make_runtime(model, masked_lm(tokenizer(), len(tokenizer()), 0.15, False), **train)
    names = runtime.working.parts.names
    plan = Plan((0, 1, 2), names, (), names)
    start = {part: (0, tensors) for part, tensors in weights_of(runtime.working).items()}
    data = ClientData(sentences(), np.arange(12), sentences(), {}, Store(tmp_path))
    reference = copy.deepcopy(model)
    plain = make_optimizer(dict(reference.named_parameters()), runtime.trainer.train, {})
    for round in range(2):
        for batch in drawn_batches(runtime.trainer, np.arange(12), round=round):
            runtime.trainer.task.loss(reference, batch).backward()
            step(plain, 1e-2)
        work = Work(runtime, train_request(plan, round), start, data, lambda *_: None)
        drain(answer_request(work, EXCHANGES["weights"].handlers))
    equal = all(torch.equal(p, reference.get_parameter(name)) for name, p in model.named_parameters())
    assert equal == kept


def test_what_rests_for_a_round_goes_on_later(tmp_path: Path) -> None:
    """Layers in turns, as of FedBT's cycle, against one optimizer that steps what has a gradient."""
    quiet: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    train = {"batch_size": 4, "learning_rate": 1e-2, "optimizer_state": "persist"}
    model = tiny_model(**quiet)
    runtime = make_runtime(model, masked_lm(tokenizer(), len(tokenizer()), 0.15, False), **train)
    parts = runtime.working.parts
    data = ClientData(sentences(), np.arange(12), sentences(), {}, Store(tmp_path))
    reference = copy.deepcopy(model)
    plain = make_optimizer(dict(reference.named_parameters()), runtime.trainer.train, {})
    for round, own in enumerate([("layer.2",), ("layer.1", "layer.2"), ("layer.2",), ("layer.1", "layer.2")]):
        names = {name for part in own for name in parts.shapes[part]}
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(name in names)
        for batch in drawn_batches(runtime.trainer, np.arange(12), round=round):
            runtime.trainer.task.loss(reference, batch).backward()
            step(plain, 1e-2)
        start = {part: (round, tensors) for part, tensors in weights_of(runtime.working).items()}
        work = Work(runtime, train_request(Plan((0, 1, 2), own, own), round), start, data, lambda *_: None)
        drain(answer_request(work, EXCHANGES["weights"].handlers))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name


def test_dice_go_on_where_they_were_and_leave_no_trace() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(0)
    outside = torch.rand(2)
    torch.manual_seed(0)
    dice = DropoutRng(7, torch.device("cpu"))
    got, free = [], []
    for _ in range(2):
        with dice.fork():
            got.append(torch.rand(2))
        free.append(torch.rand(1))
    assert torch.equal(torch.cat(got), expected)
    assert torch.equal(torch.cat(free), outside)
