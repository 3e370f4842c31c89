"""Clipped sums of per-example gradients against autograd, one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.model_pass import WholePass
from fedstrata.client.noisy_steps import NoisySteps, apart, joined
from fedstrata.client.private import ExampleNoise
from fedstrata.client.working_model import WorkingModel
from fedstrata.job.privacy_table import Privacy
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.adapters import add_adapters
from fedstrata.models.parts import find_parts
from fedstrata.plan.plan import Plan
from fedstrata.privacy.keystream import Keystream
from fedstrata.privacy.noise import norm_of
from fedstrata.privacy.per_example import add_clipped, add_whole, backward, tappable, tapped, whole_sum, zeros
from fedstrata.tasks import Batch, Task
from fedstrata.tasks.batches import IGNORE_INDEX, Examples
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.clm import CausalLM
from fedstrata.tasks.mlm import masked_lm
from fedstrata.tasks.regress import Regress
from fedstrata.tasks.tag import Tag
from roles import sentences
from tiny import gpt2_tokenizer, tiny_model, tokenizer, train_config

CASES: dict[str, tuple[str, str]] = {
    "bert classify": ("bert", "classify"),
    "bert mlm": ("bert", "mlm"),
    "bert mlm full": ("bert", "mlm full"),
    "bert tag": ("bert", "tag"),
    "bert regress": ("bert", "regress"),
    "roberta mlm": ("roberta", "mlm"),
    "distilbert mlm": ("distilbert", "mlm"),
    "electra mlm": ("electra", "mlm"),
    "modernbert mlm": ("modernbert", "mlm"),
    "gpt2 clm": ("gpt2", "clm"),
    "adapters classify": ("bert lora", "classify"),
    "adapters mlm": ("bert lora", "mlm"),
    "adapters of tables": ("bert tables", "classify"),
}
SEEN = 6


def made(kind: str, what: str) -> tuple[Any, Task, list[Batch]]:
    """A model without dropout, its task, and a batch for each of some examples."""
    head = what.split()[0]
    family = kind.split()[0]
    labels = {"classify": 3, "tag": 3, "regress": 1}.get(head)
    model = tiny_model(family, head, **({"num_labels": labels} if labels else {}))
    if "lora" in kind:
        add_adapters(model, AdapterConfig((("default", 4),), 8.0, None, 0.0, "gaussian", "plain"))
    if "tables" in kind:
        add_adapters(
            model, AdapterConfig((("default", 4),), 8.0, ("word_embeddings", "query"), 0.0, "gaussian", "plain")
        )
    tokens = gpt2_tokenizer() if family == "gpt2" else tokenizer()
    tasks: dict[str, Callable[[], Task]] = {
        "classify": lambda: Classify(0, ("a", "b", "c")),
        "regress": lambda: Regress(0),
        "tag": lambda: Tag(0, ("O", "B-x", "I-x")),
        "clm": lambda: CausalLM(0),
        "mlm": lambda: masked_lm(tokens, len(tokens), 0.3, what.endswith("full")),
    }
    task, examples = tasks[head](), sentences()
    rng = np.random.default_rng(0)
    if head == "tag":
        tags = rng.integers(0, 3, len(examples.tokens.ids))
        tags[rng.random(len(tags)) < 0.3] = IGNORE_INDEX
        examples = Examples(examples.tokens, tags)
    if head == "regress":
        examples = Examples(examples.tokens, rng.normal(size=len(examples)))
    width = int(examples.tokens.lengths[:SEEN].max())
    return model, task, [task.batch(examples, np.array([i]), rng, width) for i in range(SEEN)]


def gradients(model: Any, task: Task, batch: Batch, trained: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Autograd's own."""
    model.zero_grad(set_to_none=True)
    task.loss(model, batch).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
    model.zero_grad(set_to_none=True)
    return found


def trained_of(model: Any, kind: str) -> dict[str, nn.Parameter]:
    """All parameters; of a model with adapters these and the head."""
    named = dict(model.named_parameters())
    if kind != "bert" and kind.startswith("bert"):
        named = {n: p for n, p in named.items() if "lora_" in n or n.startswith(("classifier", "cls."))}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in named)
    return named


def slow(model: Any, task: Task, single: list[Batch], trained: dict[str, nn.Parameter]) -> tuple[Any, Any, float]:
    """The sum of clipped gradients, example by example, their norms, and the clip: half of them are longer."""
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    norms, each = [], []
    for batch in single:
        own = gradients(model, task, batch, trained)
        norms.append(norm_of(own.values()))
        each.append(own)
    clip = float(np.median(norms))
    for norm, own in zip(norms, each, strict=True):
        for name, gradient in own.items():
            total[name] += gradient * min(1.0, clip / norm)
    return total, norms, clip


def steps_of(
    model: Any, task: Task, trained: dict[str, nn.Parameter], clip: float, noise: float = 0.0
) -> NoisySteps:
    working = WorkingModel(model, find_parts(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    sample, masks = map(np.random.default_rng, (1, 2))
    draws = ExampleNoise(clip, noise, 1.0, sample, Keystream(bytes(32)), masks, dropout=4)
    return NoisySteps(working, task, train_config(dropout=False, batch_size=SEEN), nullcontext, draws)


def model_pass(steps: NoisySteps) -> WholePass:
    return WholePass(steps.working, Plan(tuple(range(steps.working.parts.depth)), ()))


@pytest.mark.parametrize("case", CASES)
def test_the_clipped_sum_is_that_of_a_loop_over_single_examples(case: str) -> None:
    kind, what = CASES[case]
    model, task, single = made(kind, what)
    model.eval()
    trained = trained_of(model, kind)
    expected, norms, clip = slow(model, task, single, trained)
    steps = steps_of(model, task, trained, clip)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = model.config.hidden_dropout_prob = 0.0
    whole = joined(single)
    found = zeros(trained)
    loss = steps._add_clipped(found, whole, model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    assert steps.tapping is (kind != "bert tables")  # an adapter of a table has matrices without a module
    assert min(norms) < clip < max(norms)
    for name, own in expected.items():
        torch.testing.assert_close(found[name], own, rtol=1e-3, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
    assert float(loss) > 0
    again = steps._add_clipped(found, whole, model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    assert float(again) == pytest.approx(float(loss), rel=1e-5)
    for name, own in expected.items():  # batches after the first have no gradients of parameters
        torch.testing.assert_close(found[name], 2 * own, rtol=1e-3, atol=4e-6)
        assert trained[name].grad is None


def test_a_step_has_the_gradients_of_its_own_batch_alone() -> None:
    model, task, single = made("bert", "classify")
    model.config.attention_probs_dropout_prob = model.config.hidden_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained, index = trained_of(model, "bert"), np.arange(SEEN)
    steps = steps_of(model, task, trained, clip=1.0)

    def gradients(of: NoisySteps, batch: Batch) -> list[torch.Tensor]:
        of.gradients([(index, batch)], model_pass(of), DropoutRng(0, torch.device("cpu")), trained)
        return [parameter.grad.clone() for parameter in trained.values() if parameter.grad is not None]

    gradients(steps, joined(single))
    second = joined(single[::2])
    found = gradients(steps, second)
    expected = gradients(steps_of(model, task, trained, clip=1.0), second)
    assert len(found) == len(trained)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("what", ["classify", "tag", "regress"])
@pytest.mark.parametrize("tapping", [None, True, False])
def test_an_example_that_overflows_adds_nothing(tapping: bool | None, what: str) -> None:
    """0 times infinity is no number: the rows of a table that are none tell every word of the example."""
    model, task, single = made("bert", what)
    model.eval()
    model.config.attention_probs_dropout_prob = model.config.hidden_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained = trained_of(model, "bert")
    with torch.no_grad():  # a word of the first example alone
        others = torch.cat([batch.inputs["input_ids"].flatten() for batch in single[1:]])
        own = next(token for token in single[0].inputs["input_ids"].flatten() if token not in others)
        model.bert.embeddings.word_embeddings.weight[own] = 3e38
    expected, _, clip = slow(model, task, single[1:], trained)
    steps, found = steps_of(model, task, trained, clip), zeros(trained)
    steps.tapping = tapping
    steps._add_clipped(found, joined(single), model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    assert steps.told
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)


def test_a_second_use_of_a_parameter_is_seen_in_the_first_batch() -> None:
    """Then every example gets a backward pass of its own."""
    model, task, single = made("bert", "classify")
    model.eval()
    model.config.attention_probs_dropout_prob = model.config.hidden_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    weight = model.classifier.weight
    model.bert.pooler.register_forward_hook(lambda module, inputs, output: output * (1 + weight.abs().sum()))
    trained = trained_of(model, "bert")
    expected, _, clip = slow(model, task, single, trained)
    steps, found = steps_of(model, task, trained, clip), zeros(trained)
    assert tappable(model, trained)
    steps._add_clipped(found, joined(single), model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    assert steps.tapping is False
    for name, own in expected.items():
        torch.testing.assert_close(found[name], own, rtol=1e-3, atol=2e-6)


def test_a_tied_table_counts_the_product_of_its_two_uses() -> None:
    """The word embeddings of a language model are its decoder too: one gradient, not two."""
    model, task, single = made("bert", "mlm")
    model.eval()
    name = "bert.embeddings.word_embeddings.weight"
    trained = {name: dict(model.named_parameters())[name]}
    for other, parameter in model.named_parameters():
        parameter.requires_grad_(other == name)
    _, norms, clip = slow(model, task, single, trained)
    whole = joined(single)
    counts = whole.positions.sum(1)
    with tapped(model, trained, SEEN) as calls:
        loss = task.loss(model, whole) * int(counts.sum())
    backward(loss, calls)
    owners = whole.positions.nonzero()[:, 0]
    found = add_clipped(zeros(trained), trained, calls, owners, 1 / counts.clamp(min=1).float(), clip)
    np.testing.assert_allclose(found.numpy(), norms, rtol=1e-4)


@pytest.mark.parametrize("tapping", [True, False])
def test_rows_that_stay_count_in_no_norm(tapping: bool) -> None:
    """Of a table that is the decoder too, and of the decoder's bias."""
    model, task, single = made("bert", "mlm")
    model.eval()
    trained = trained_of(model, "bert")
    rows = torch.arange(6, len(tokenizer()))
    still = {"bert.embeddings.word_embeddings.weight": rows, "cls.predictions.bias": rows}
    each = [gradients(model, task, batch, trained) for batch in single]
    whole_norms = [norm_of(own.values()) for own in each]
    for own in each:
        for name in still:
            own[name][rows] = 0.0
    norms = [norm_of(own.values()) for own in each]
    assert min(norm / whole for norm, whole in zip(norms, whole_norms, strict=True)) < 0.98
    clip = float(np.median(norms))
    steps = steps_of(model, task, trained, clip)
    steps.still, steps.tapping = still, tapping
    model.config.attention_probs_dropout_prob = model.config.hidden_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found = zeros(trained)
    steps._add_clipped(found, joined(single), model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    for name in trained:
        expected = sum(own[name] * min(1.0, clip / norm) for own, norm in zip(each, norms, strict=True))
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=2e-6)


def test_no_clip_that_a_job_may_have_lets_longer_gradients_pass() -> None:
    """A server's weights can make gradients so small that the squares of all but one of their numbers are 0: 50
    times the clip passed, under noise for one. So no job has such a clip."""
    with pytest.raises(ValidationError, match="clip"):
        Privacy(level="example", clip=1e-22, noise=1.0)
    layer = nn.Linear(4, 10_000, bias=False)
    trained = {"weight": layer.weight}
    least = Privacy(level="example", clip=1e-6, noise=1.0).clip
    for size in (1e-22, least, 1.0):
        gradient = torch.full((10_000,), 0.25 * size)
        gradient[0] = 0.3 * size
        with tapped(layer, trained, 2) as calls:
            loss = (layer(torch.ones(2, 4)) * torch.stack([gradient, 0 * gradient])).sum()
        backward(loss, calls)
        total = zeros(trained)
        add_clipped(total, trained, calls, None, torch.ones(2), least)
        assert norm_of(total.values()) <= 1.001 * least


def test_inputs_whose_squares_are_nothing_let_no_longer_gradient_pass() -> None:
    """By a server's weights: 18 times the clip passed, which inputs so small had times gradients so large."""
    layer, clip = nn.Linear(768, 200, bias=False), 1e-4
    trained = {"weight": layer.weight}
    inputs = torch.full((2, 768), 2.5e-23)
    inputs[:, 0] = 3e-23
    with tapped(layer, trained, 2) as calls:
        loss = (layer(inputs) * torch.tensor([[2e17], [0.0]])).sum()
    backward(loss, calls)
    total = zeros(trained)
    norms = add_clipped(total, trained, calls, None, torch.ones(2), clip)
    assert norms[0] == pytest.approx(2e17 * 200**0.5 * float(inputs[0].double().norm()), rel=1e-4)
    assert norm_of(total.values()) <= 1.001 * clip


@pytest.mark.parametrize("units", [0.6, 1.6])
def test_inputs_so_large_that_clipped_gradients_have_no_digits_let_no_longer_one_pass(units: float) -> None:
    """By a server's weights: 1.67 and 1.25 times the clip passed, by how fp32 rounds its least numbers."""
    layer, positions = nn.Linear(64, 48, bias=False), 8
    nn.init.zeros_(layer.weight)
    trained, inputs = {"weight": layer.weight}, torch.full((2, positions, 64), 3e38)
    clip = units * 2.0**-149 * 3e38 * positions * (64 * 48) ** 0.5
    with tapped(layer, trained, 2) as calls:
        loss = (layer(inputs) * torch.tensor([1e-38, 0.0])[:, None, None]).sum()
    backward(loss, calls)
    total = zeros(trained)
    add_clipped(total, trained, calls, None, torch.ones(2), clip)
    assert norm_of(total.values()) == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("clip", [1e-6, 1e-3, 1.0])
def test_a_gradient_so_long_that_its_factor_has_no_digits_is_clipped(clip: float) -> None:
    """By a server's weights: 1.97 times the clip passed where a gradient is formed by itself."""
    for size in (1e20, 1.76e38, 2.4e38, 3e38):
        own = {"weight": torch.full((64,), size)}
        total = {"weight": torch.zeros(64)}
        add_whole(total, own, norm_of(own.values()), clip)
        assert norm_of(total.values()) == pytest.approx(clip, rel=1e-5)


def test_what_the_taps_overlook_is_found() -> None:
    """A parameter that is used beside its module: the sum of what was tapped is not autograd's."""

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) @ self.inner.weight

    model, x = Sly(), torch.randn(5, 4)
    trained = dict(model.named_parameters())
    assert tappable(model, trained)
    with tapped(model, trained, 5) as calls:
        loss = model(x).square().sum()
    own = backward(loss, calls, trained)
    found = whole_sum(trained, calls, None, 5)
    assert torch.allclose(found["inner.bias"], own["inner.bias"], rtol=1e-4)
    assert not torch.allclose(found["inner.weight"], own["inner.weight"], rtol=1e-2)


def test_apart_is_the_opposite_of_joined() -> None:
    for kind, what in (("bert", "mlm"), ("bert", "tag"), ("bert", "classify")):
        _, _, single = made(kind, what)
        for one, again in zip(single, apart(joined(single)), strict=True):
            torch.testing.assert_close(one.inputs, again.inputs)
            torch.testing.assert_close(one.targets, again.targets)


def test_the_noise_has_its_deviation_and_no_batch_is_noise_alone() -> None:
    model, task, _ = made("bert", "classify")
    trained = dict(model.named_parameters())
    steps = steps_of(model, task, trained, 0.05, noise=3.0)
    loss = steps.gradients([], model_pass(steps), DropoutRng(0, torch.device("cpu")), trained)
    drawn = torch.cat([p.grad.flatten() for p in trained.values()])
    assert float(loss) == 0.0
    assert float(drawn.std()) == pytest.approx(0.15, rel=0.02)
    assert abs(float(drawn.mean())) < 4 * 0.15 / len(drawn) ** 0.5
