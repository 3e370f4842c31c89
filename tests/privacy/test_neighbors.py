"""Level ``example`` by brute force: a sum of clipped gradients with and without one example of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_per_example import CASES, made, model_pass, steps_of, trained_of
from torch import nn

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.noisy_steps import NoisySteps, joined
from fedstrata.data.tokens import Tokens
from fedstrata.models import checkpoints
from fedstrata.models.heads import KEY, HeadConfig, HeadedModel
from fedstrata.privacy.noise import norm_of
from fedstrata.privacy.per_example import zeros
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.regress import Regress
from roles import sentences
from tiny import tiny_config, tiny_model, train_config

HEADS = ("cls", "mean", "psum", "hsum")
Sums = dict[str, torch.Tensor]


def quiet(model: Any) -> Any:
    """The model without dropout, in training."""
    model.config.attention_probs_dropout_prob = model.config.hidden_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def as_wide_as_the_longest(single: Sequence[Batch]) -> Batch:
    """Examples that were made at one width as a batch of their own longest: what is masked of each is the same."""
    width = max(int(batch.inputs["attention_mask"].sum()) for batch in single)

    def cut(tensor: Any) -> Any:
        return tensor[:, :width] if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 else tensor

    return joined(
        [
            replace(
                batch,
                inputs={name: cut(tensor) for name, tensor in batch.inputs.items()},
                targets=cut(batch.targets),
                positions=cut(batch.positions),
            )
            for batch in single
        ]
    )


def summed(steps: NoisySteps, single: Sequence[Batch], trained: dict[str, nn.Parameter]) -> Sums:
    total = zeros(trained)
    rng = DropoutRng(0, torch.device("cpu"))
    steps._add_clipped(total, as_wide_as_the_longest(single), model_pass(steps), rng, trained)
    return total


def no_neighbor_is_further_than_the_clip(
    model: Any, task: Task, single: list[Batch], trained: dict[str, nn.Parameter]
) -> None:
    """Whichever is there or not, the longest too, by which all others are as wide."""
    steps = steps_of(quiet(model), task, trained, 1e9)
    norms = [norm_of(summed(steps, [batch], trained).values()) for batch in single]
    clip = float(np.median(norms))
    steps = steps_of(model, task, trained, clip)
    whole = summed(steps, single, trained)
    for gone, norm in enumerate(norms):
        rest = summed(steps, [*single[:gone], *single[gone + 1 :]], trained)
        moved = norm_of(whole[name] - rest[name] for name in trained)
        assert moved == pytest.approx(min(norm, clip), rel=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_an_example_moves_a_sum_by_its_clipped_gradient_and_no_other_examples(case: str) -> None:
    kind, what = CASES[case]
    model, task, single = made(kind, what)
    no_neighbor_is_further_than_the_clip(model, task, single, trained_of(model, kind))


@pytest.mark.parametrize("kind", HEADS)
def test_so_it_does_through_every_head(kind: str) -> None:
    config = tiny_config("bert", 4, num_labels=3)
    setattr(config, KEY, vars(HeadConfig(kind, average="probabilities")))  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = HeadedModel.from_config(config)
    task = Classify(0, ("eye", "heart", "kidney"))
    no_neighbor_is_further_than_the_clip(model, task, alone(task), dict(model.named_parameters()))


@pytest.mark.parametrize("pads", [{}, {"pad_token_id": 0}])
def test_so_it_does_where_the_last_token_is_read(model_folder: Callable[..., Path], pads: dict[str, int]) -> None:
    loaded = checkpoints.load(str(model_folder("gpt2", head="clm", **pads)), "regress", None, 0, dropout=False)
    task = Regress(loaded.tokenizer.pad_token_id)
    no_neighbor_is_further_than_the_clip(loaded.model, task, alone(task), dict(loaded.model.named_parameters()))


def alone(task: Task) -> list[Batch]:
    """A batch for each of some texts of different lengths."""
    examples, rng = sentences(), np.random.default_rng(0)
    width = int(examples.tokens.lengths.max())
    return [task.batch(examples, np.array([i]), rng, width) for i in range(6)]


def test_by_weights_that_enlarge_rounding_one_example_moves_no_more_than_its_own_clip() -> None:
    """The last layer sees nothing but how attention's shares of a constant are rounded.

    In one batch all others are padded for the longest example, and their products rounded in other ways.
    """
    model = quiet(tiny_model("bert", "classify", num_labels=3))
    layer = model.bert.encoder.layer[-1].attention
    count = layer.self.value.bias.numel()
    constant = 50 + 100 * torch.rand(count, generator=torch.Generator().manual_seed(0))
    for parameter, value in (
        (layer.self.value.weight, 0.0),
        (layer.self.value.bias, constant),
        (layer.output.dense.weight, 1e6 * torch.eye(count)),
        (layer.output.dense.bias, -1e6 * constant),
    ):
        parameter.detach().copy_(torch.as_tensor(value))
    lengths = np.asarray([9] * 11 + [60])
    ids = np.random.default_rng(0).integers(5, 40, lengths.sum()).astype(np.int32)
    tokens = Tokens(ids, np.concatenate([[0], np.cumsum(lengths)]), np.arange(len(lengths)))
    examples = Examples(tokens, np.arange(len(lengths)) % 3)
    trained = dict(model.named_parameters())
    sums = []
    for index in (np.arange(len(lengths)), np.arange(len(lengths) - 1)):
        steps = steps_of(model, Classify(0, ("eye", "heart", "kidney")), trained, 1.0)
        steps.train, steps.noise = train_config(batch_size=len(lengths)), replace(steps.noise, alone=True)
        [(_, batches)] = steps.steps(examples, index)
        steps.gradients(batches, model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
        sums.append({name: total.clone() for name, total in steps.total.items()})
    assert norm_of(sums[0][name] - sums[1][name] for name in trained) == pytest.approx(1, rel=1e-4)
