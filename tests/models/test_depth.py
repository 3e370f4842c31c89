"""A local model of other depth equals one that was really built."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers

from fedstrata.models.checkpoints import auto_class
from fedstrata.models.depth import local_depth
from fedstrata.models.parts import find_parts
from tiny import CONFIGS, tiny_config, tiny_model

IDS = torch.randint(5, 68, (2, 20), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, 12:] = 0
DEPTH = 4


def strong(architecture: str, kind: str = "mlm") -> Any:
    """A model whose layers change what goes through them by much more than rounding."""
    changes = {"use_cache": False} if architecture == "gpt2" else {}
    return tiny_model(architecture, kind, DEPTH, initializer_range=0.3, **changes).eval()


def built(model: Any, architecture: str, kind: str, layers: tuple[int, ...]) -> Any:
    """A model of ``len(layers)`` layers made from its config, with copies of the given layers."""
    changes: dict[str, Any] = {"use_cache": False} if architecture == "gpt2" else {}
    if architecture == "modernbert":
        changes["layer_types"] = [model.config.layer_types[i] for i in layers]
    small = auto_class(kind).from_config(tiny_config(architecture, len(layers), **changes))
    stack = find_parts(model).stack
    copied = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{stack}."):
            copied[name] = tensor
    for j, i in enumerate(layers):
        for name, tensor in model.get_submodule(stack)[i].state_dict().items():
            copied[f"{stack}.{j}.{name}"] = tensor
    small.load_state_dict(copied)
    return small.eval()


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=MASK).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("architecture", "kind"), [*itertools.product(CONFIGS, ["mlm", "classify"]), ("gpt2", "clm")]
)
@pytest.mark.parametrize("layers", [(0, 1), (0, 2, 3), (0, 3, 3), (0, 1, 2, 3, 3, 3), (0,)])
def test_equals_a_model_built_of_copies(architecture: str, layers: tuple[int, ...], kind: str) -> None:
    model = strong(architecture, kind)
    with torch.no_grad():
        whole = logits(model)
        with local_depth(model, find_parts(model), layers):
            local = logits(model)
        torch.testing.assert_close(local, logits(built(model, architecture, kind, layers)), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(local, whole, atol=0.01)
        assert torch.equal(logits(model), whole), "the whole model is not restored"


@pytest.mark.parametrize("layers", [(0, 3), (0, 2, 3), (0, 1, 2, 3, 3, 1)])
def test_layers_whose_kinds_stand_in_the_config_alone(layers: tuple[int, ...]) -> None:
    """The layer at a place had the mask and the rotation of the one that stands there in the whole model."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"vocab_size": 68, "pad_token_id": 0, "hidden_size": 32, "intermediate_size": 64}

    def made(own: list[str]) -> Any:
        config = transformers.ModernBertDecoderConfig(
            **sizes,
            num_attention_heads=2,
            num_hidden_layers=len(own),
            layer_types=own,
            local_attention=4,
            initializer_range=0.3,
        )
        config.use_cache = False
        torch.manual_seed(0)
        return transformers.ModernBertDecoderForCausalLM(config).eval()

    model, small = made(kinds), made([kinds[i] for i in layers])
    small.load_state_dict({**small.state_dict(), **model.state_dict()}, strict=False)
    with torch.no_grad(), local_depth(model, find_parts(model), layers):
        stack = find_parts(small).stack
        for own, theirs in zip(small.get_submodule(stack), model.get_submodule(stack), strict=True):
            own.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(logits(model), logits(small), rtol=1e-3, atol=1e-3)
    assert model.config.layer_types == kinds


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_the_order_of_layers_counts(architecture: str) -> None:
    model = strong(architecture)
    parts = find_parts(model)
    made = []
    with torch.no_grad():
        for layers in ((0, 1, 3), (0, 3, 1)):
            with local_depth(model, parts, layers):
                made.append(logits(model))
    assert not torch.allclose(*made, atol=0.01)


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_gradients_land_in_the_whole_models_layers(architecture: str) -> None:
    """For a layer that stands twice they are the sum over both places."""
    layers = (0, 2, 2)
    model = strong(architecture)
    parts = find_parts(model)
    small = built(model, architecture, "mlm", layers)
    with local_depth(model, parts, layers):
        logits(model).square().sum().backward()
    logits(small).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in parts.shapes["layer.0"]:
        torch.testing.assert_close(grads[name], small.get_parameter(name).grad, rtol=1e-3, atol=1e-3)
    for name in parts.shapes["layer.2"]:
        one, other = (
            small.get_parameter(name.replace(f"{parts.stack}.2.", f"{parts.stack}.{j}.")) for j in (1, 2)
        )
        torch.testing.assert_close(grads[name], one.grad + other.grad, rtol=1e-3, atol=1e-3)
    for part in ("layer.1", "layer.3"):
        assert all(grads[name] is None for name in parts.shapes[part])


def test_no_module_is_copied_and_names_come_back() -> None:
    model = tiny_model(layers=DEPTH)
    parts = find_parts(model)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    order = [name for name, _ in model.bert.encoder.named_children()]
    third = model.bert.encoder.layer[2]
    with local_depth(model, parts, (0, 2, 2)):
        assert [id(layer) for layer in model.bert.encoder.layer][1:] == [id(third)] * 2
        assert len(model.bert.encoder.layer) == 3
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [name for name, _ in model.bert.encoder.named_children()] == order


def test_training_inside_trains_the_whole_models_layer() -> None:
    model = tiny_model(layers=DEPTH)
    parts = find_parts(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in parts.shapes["layer.1"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with local_depth(model, parts, (0, 1, 3)):
        logits(model).square().mean().backward()
        optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert changed <= parts.shapes["layer.1"].keys()
    assert f"{parts.stack}.1.output.dense.weight" in changed


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_restored_after_an_exception(error: type[BaseException]) -> None:
    model = tiny_model(layers=DEPTH)
    stack = model.bert.encoder.layer
    with pytest.raises(error), local_depth(model, find_parts(model), (0, 2)):
        raise error
    assert model.bert.encoder.layer is stack
    assert len(stack) == DEPTH


def test_a_layer_outside_the_model_changes_nothing() -> None:
    model = tiny_model()
    stack = model.bert.encoder.layer
    with pytest.raises(IndexError), local_depth(model, find_parts(model), (0, 3)):
        raise AssertionError("entered")
    assert model.bert.encoder.layer is stack
