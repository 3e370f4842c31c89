"""Dropout from a stream: the rate, the arithmetic of torch's own, and torch's own wherever no stream is set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fedstrata.client.dropout import DropoutRng
from fedstrata.models.dropout import WORD, Dropout, drawing, keep_mask, place_dropout
from tiny import tiny_model

CPU = torch.device("cpu")


def every_word(shape: Sequence[int]) -> torch.Tensor:
    """Each of the 65,536 words once."""
    return torch.arange(-WORD // 2, WORD // 2).short().reshape(tuple(shape))


@pytest.mark.parametrize("p", [0.1, 0.5, 1e-4, 0.99999])
def test_the_rate_is_exact_to_16_bits_and_the_mean_stays(p: float) -> None:
    mask, factor = keep_mask(every_word, (4, WORD // 4), p, torch.float32)
    dropped = int((mask == 0).sum())
    assert dropped == round(p * WORD)
    assert int((mask == 1).sum()) == WORD - dropped
    assert float(mask.double().mean()) * factor == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch_with_the_same_mask(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(7, 13, 5, dtype=dtype)
    one, two = (values.clone().requires_grad_() for _ in range(2))
    with drawing(DropoutRng(3, CPU).words):
        out = Dropout(0.25).train()(one)
    mask = (DropoutRng(3, CPU).words(values.shape) >= 0.25 * WORD - WORD // 2).to(dtype)
    expected = two * mask.div_(0.75)  # torch: noise.bernoulli_(1 - p).div_(1 - p), input * noise
    assert 0 < int((mask == 0).sum()) < mask.numel()
    assert torch.equal(out, expected)
    gradient = torch.randn(values.shape, dtype=dtype)
    out.backward(gradient)
    expected.backward(gradient)
    assert one.grad is not None
    assert two.grad is not None
    assert torch.equal(one.grad, two.grad)


def test_without_a_stream_and_out_of_training_it_is_torchs() -> None:
    values = torch.ones(1000)
    own, plain = Dropout(0.1).train(), nn.Dropout(0.1).train()
    outs = []
    for module in (own, plain):
        torch.manual_seed(0)
        outs.append(module(values))
    assert torch.equal(*outs)
    with drawing(DropoutRng(0, CPU).words):
        assert torch.equal(own.eval()(values), values)
        assert torch.equal(Dropout(0.0).train()(values), values)
        assert torch.equal(Dropout(1.0).train()(values), torch.zeros(1000))


def test_a_stream_goes_on_and_two_seeds_differ() -> None:
    rng = DropoutRng(5, CPU)
    first, second = rng.words((3, 7)), rng.words((3, 7))
    again = DropoutRng(5, CPU)
    assert torch.equal(again.words((3, 7)), first)
    assert torch.equal(again.words((3, 7)), second)
    assert not torch.equal(first, second)
    assert not torch.equal(DropoutRng(6, CPU).words((3, 7)), first)
    words = DropoutRng(7, CPU).words((1 << 20,)).double()
    assert abs(float(words.mean()) + 0.5) < 100, "of a standard error of 18.5"
    assert words.dtype == torch.float64


def test_a_models_dropout_is_replaced_and_nothing_else() -> None:
    model = tiny_model(hidden_dropout_prob=0.3)
    before = {name: type(module) for name, module in model.named_modules()}
    names = list(model.state_dict())
    place_dropout(model.train())
    after = {name: type(module) for name, module in model.named_modules()}
    assert nn.Dropout not in after.values()
    assert {name for name in after if after[name] is not before[name]} == {
        name for name in before if before[name] is nn.Dropout
    }
    assert {module.p for module in model.modules() if isinstance(module, Dropout)} == {0.1, 0.3}
    assert list(model.state_dict()) == names
