"""Scores are of the model as it was trained: with the same padding, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from fedstrata.client.model_pass import WholePass
from fedstrata.client.scorer import scored_batches
from fedstrata.models.heads import HeadedModel
from fedstrata.plan.plan import Plan
from fedstrata.tasks.classify import Classify
from roles import make_runtime, sentences
from tiny import tiny_config, train_config


def test_a_mean_over_the_padding_is_over_max_tokens_in_scoring_too() -> None:
    """Else a text's score depends on the longest text of its batch."""
    settings = {"kind": "mean", "tokens": "all"}
    transformers.set_seed(0)
    model = HeadedModel.from_config(tiny_config(num_labels=3, fedstrata_head=settings)).eval()
    rows, task = sentences(), Classify(0, ("eye", "heart", "kidney"))
    assert rows.tokens.lengths.min() < rows.tokens.lengths.max() < 32
    runtime = make_runtime(model, task, batch_size=2, padding="max", max_tokens=32)
    with torch.inference_mode():
        whole = task.score(model, [task.batch(rows, np.arange(len(rows)), np.random.default_rng(0), 32)])
    model_pass = WholePass(runtime.working, Plan((0, 1, 2), ()))
    assert runtime.scorer.run(rows, None, model_pass) == pytest.approx(whole)


def test_a_budget_of_tokens_counts_the_padding_of_what_is_scored() -> None:
    rows = sentences()
    for padding, width in (("batch", None), ("max", 32)):
        train = train_config(tokens_per_batch=64, padding=padding, max_tokens=32)
        made = scored_batches(rows, np.arange(len(rows)), train)
        for index in made:
            assert len(index) * (width or rows.tokens.lengths[index].max()) <= 2 * 64, padding
