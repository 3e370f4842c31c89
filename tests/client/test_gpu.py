"""What a GPU must not wait for, shown on the meta device, from which nothing can be read; and a round on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.client.trainer import LOSS_EVERY, newest_loss
from fedstrata.plan.plan import Plan
from fedstrata.tasks.mlm import masked_lm
from roles import make_runtime, sentences, train_round
from tiny import tiny_model, tokenizer

META = torch.device("meta")
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_a_loss_elsewhere_is_read_only_every_so_many_steps() -> None:
    here = [torch.tensor(float(step)) for step in range(40)]
    away = [torch.empty((), device=META) for _ in range(40)]
    for count in range(1, 41):
        assert newest_loss(here[:count], -1.0) == count - 1
        if count % LOSS_EVERY == 1:
            with pytest.raises((RuntimeError, NotImplementedError)):
                newest_loss(away[:count], 0.5)
        else:
            assert newest_loss(away[:count], 0.5) == 0.5


def test_places_of_predictions_go_as_indices() -> None:
    task = masked_lm(tokenizer(), len(tokenizer()), 0.3, False)
    batch = task.batch(sentences(), np.arange(6), np.random.default_rng(0), None)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(META)
    assert isinstance(batch.positions, torch.Tensor)
    assert isinstance(moved.positions, tuple)
    assert [index.device for index in moved.positions] == [META, META]
    assert {len(index) for index in moved.positions} == {int(batch.positions.sum())}
    assert moved.targets.device == META


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_round_on_a_gpu_is_that_of_the_cpu() -> None:
    task = masked_lm(tokenizer(), len(tokenizer()), 0.3, False)
    losses = []
    for device in ("cpu", "cuda"):
        runtime = make_runtime(tiny_model(**QUIET), task, batch_size=2, device=device)
        runtime.working.model.to(device)
        plan = Plan((0, 1, 2), runtime.working.parts.names)
        losses.append(train_round(runtime, plan, np.arange(12), "a").loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
