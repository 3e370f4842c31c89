"""The MLM head at some positions equals the whole head there, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from fedstrata.models.masked_head import head_at
from tiny import CONFIGS, tiny_model

IDS = torch.randint(5, 68, (3, 14), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[2, 9:] = 0
POSITIONS = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2)) < 0.3
TARGETS = IDS[POSITIONS].flip(0)


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=MASK).logits  # type: ignore[no-any-return]


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_those_of_the_whole_head_at_the_positions(architecture: str) -> None:
    model = tiny_model(architecture).eval()
    assert 3 < POSITIONS.sum() < POSITIONS.numel() / 2
    with torch.no_grad():
        whole = logits(model)
        with head_at(model, POSITIONS):
            some = logits(model)
        assert some.shape == (1, int(POSITIONS.sum()), 68)
        torch.testing.assert_close(some[0], whole[POSITIONS], rtol=1e-5, atol=1e-6)
        assert torch.equal(some[0].argmax(-1), whole[POSITIONS].argmax(-1))
        assert torch.equal(logits(model), whole), "the hook is still there"


def test_a_language_model_that_calls_past_its_base_has_them_too() -> None:
    """OPT's: a run of clm ended with sizes that do not fit."""
    sizes = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
    config = transformers.OPTConfig(**sizes, num_attention_heads=2, vocab_size=68, max_position_embeddings=66)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        whole = logits(model)
        with head_at(model, POSITIONS):
            some = logits(model)
    torch.testing.assert_close(some[0], whole[POSITIONS], rtol=1e-5, atol=1e-6)


def test_logits_come_row_by_row() -> None:
    """In the order of the rows, then of the positions within a row."""
    model = tiny_model().eval()
    chosen = torch.zeros_like(POSITIONS)
    places = [(0, 3), (0, 11), (1, 0), (2, 2)]
    for row, column in places:
        chosen[row, column] = True
    with torch.no_grad():
        whole = logits(model)
        with head_at(model, chosen):
            some = logits(model)[0]
    for found, (row, column) in zip(some, places, strict=True):
        torch.testing.assert_close(found, whole[row, column], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_gradients_are_those_of_the_whole_head(architecture: str) -> None:
    grads = []
    for masked in (False, True):
        model = tiny_model(architecture).eval()
        if masked:
            with head_at(model, POSITIONS):
                made = logits(model)[0]
        else:
            made = logits(model)[POSITIONS]
        functional.cross_entropy(made, TARGETS).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, masked_grads = grads
    assert plain.keys() == masked_grads.keys()
    for name, grad in plain.items():
        assert (grad is None) == (masked_grads[name] is None), name
        if grad is not None:
            torch.testing.assert_close(masked_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert sum(grad is not None and bool(grad.any()) for grad in plain.values()) > 20


def test_the_head_really_sees_less() -> None:
    model = tiny_model().eval()
    seen: list[torch.Size] = []
    model.cls.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape))
    with torch.no_grad(), head_at(model, POSITIONS):
        logits(model)
    assert seen == [torch.Size([1, int(POSITIONS.sum()), 32])]


def test_no_position_gives_no_logits() -> None:
    model = tiny_model().eval()
    with torch.no_grad(), head_at(model, torch.zeros_like(POSITIONS)):
        assert logits(model).shape == (1, 0, 68)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_hook_goes_with_an_exception(error: type[BaseException]) -> None:
    model = tiny_model().eval()
    whole = logits(model)
    with pytest.raises(error), head_at(model, POSITIONS):
        raise error
    assert hooks(model) == 0
    assert torch.equal(logits(model), whole)


def test_two_models_do_not_meet() -> None:
    one, other = tiny_model().eval(), tiny_model().eval()
    with torch.no_grad(), head_at(one, POSITIONS):
        assert (hooks(one), hooks(other)) == (1, 0)
        assert logits(other).shape == (*IDS.shape, 68)
