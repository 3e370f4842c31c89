"""What is tapped for the clipped sum when it is not what it looks like, and where a norm is lost in rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_per_example import gradients, model_pass, slow, steps_of
from torch import nn

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.noisy_steps import NoisySteps, joined
from fedstrata.privacy.noise import norm_of
from fedstrata.privacy.per_example import add_clipped, backward, tapped, zeros
from fedstrata.tasks import Batch
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from roles import sentences
from tiny import SPECIAL, tokenizer, words

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "vocab_size": len(SPECIAL) + len(words()),
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TASK = Classify(0, ("eye", "heart", "kidney"))
TURNED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}


def classifier(kind: str) -> Any:
    """A model whose tables of relative positions are looked up once for all texts."""
    configs = {"mpnet": transformers.MPNetConfig, "deberta": transformers.DebertaV2Config}
    config = configs[kind](**SIZES, **(TURNED if kind == "deberta" else {}), num_labels=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def alone(count: int, width: int, masked: bool = False) -> list[Batch]:
    """A batch for each of some texts, all equally wide."""
    task = masked_lm(tokenizer(), len(tokenizer()), 0.3, False) if masked else TASK
    rng, examples = np.random.default_rng(0), sentences()
    return [task.batch(examples, np.array([i % len(examples)]), rng, width) for i in range(count)]


def added(steps: NoisySteps, batch: Batch, trained: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """What a batch adds to an empty sum."""
    total = zeros(trained)
    steps._add_clipped(total, batch, model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    return total


def the_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, own in expected.items():
        torch.testing.assert_close(found[name], own, rtol=1e-3, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("believed", [False, True])
def test_one_example_shows_nothing_and_an_error_later_adds_nothing(believed: bool) -> None:
    """A table ``[1, 132, ·]`` that goes through modules looks like one text; ``believed``: a check has passed."""
    model = classifier("deberta")
    top = {n: p for n, p in model.named_parameters() if n.startswith(("classifier", "pooler")) or "layer.2." in n}
    single = alone(4, 16)
    expected, _, clip = slow(model, TASK, single[1:], top)
    steps = steps_of(model, TASK, top, clip)
    first = added(steps, single[0], top)
    own = gradients(model, TASK, single[0], top)
    the_same(first, {name: each * min(1.0, clip / norm_of(own.values())) for name, each in own.items()})
    assert steps.tapping is None
    steps.tapping = True if believed else None
    the_same(added(steps, joined(single[1:]), top), expected)
    assert steps.tapping is False


@pytest.mark.parametrize("count", [15, 16])
def test_a_table_of_as_many_rows_as_texts_is_not_by_example(count: int) -> None:
    """``[S, S]`` relative positions of S texts: autograd's sum agrees, and the norms would not."""
    model, single = classifier("mpnet"), alone(count, 16)
    trained = dict(model.named_parameters())
    for name, parameter in trained.items():
        if "attn" in name and parameter.ndim == 2:
            parameter.data *= 10
    expected, _, clip = slow(model, TASK, single, trained)
    steps = steps_of(model, TASK, trained, clip)
    the_same(added(steps, joined(single), trained), expected)
    assert steps.tapping is False


def test_a_table_of_as_many_rows_as_predictions_is_not_by_example() -> None:
    """It would be taken for the positions that the head is given."""

    single, task = alone(3, 16, masked=True), masked_lm(tokenizer(), len(tokenizer()), 0.3, False)
    whole = joined(single)
    assert isinstance(whole.positions, torch.Tensor)
    masked = transformers.AutoModelForMaskedLM.from_config(classifier("mpnet").config).eval()
    masked.extra = nn.Linear(32, 32)
    table = torch.randn(1, int(whole.positions.sum()), 32)
    masked.lm_head.register_forward_hook(lambda module, inputs, output: output * masked.extra(table).mean())
    trained = dict(masked.extra.named_parameters(prefix="extra"))
    expected, _, clip = slow(masked, task, single, trained)
    steps = steps_of(masked, task, trained, clip)
    the_same(added(steps, whole, trained), expected)
    assert steps.tapping is False


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("common", [0.0, 1e3, 1e5])
def test_no_example_moves_a_sum_further_than_the_clip(width: int, common: float) -> None:
    """Of positions that have much in common and whose gradients sum to zero, rounding leaves no norm."""
    generator = torch.Generator().manual_seed(0)
    linear, clip = nn.Linear(width, width, bias=False), 0.01
    trained = {"w": linear.weight}
    inputs = torch.randn(3, 16, width, generator=generator) + torch.tensor([common, 0.0, 0.0])[:, None, None]
    wanted = torch.randn(3, 16, width, generator=generator)
    wanted = wanted - wanted.mean(1, keepdim=True)
    sums = []
    for chosen in ([0, 1, 2], [1, 2]):
        with tapped(linear, trained, len(chosen)) as calls:
            loss = (linear(inputs[chosen]) * wanted[chosen]).sum()
        backward(loss, calls)
        sums.append(zeros(trained))
        norms = add_clipped(sums[-1], trained, calls, None, torch.ones(len(chosen)), clip)
    moved = norm_of([sums[0]["w"] - sums[1]["w"]])
    assert moved == pytest.approx(clip, rel=1e-3)
    true = (wanted.double().mT @ inputs.double()).flatten(1).norm(dim=1)
    np.testing.assert_allclose(norms.numpy(), true[1:].numpy(), rtol=1e-4)
