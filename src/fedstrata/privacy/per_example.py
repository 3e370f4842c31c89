"""Clipped sums of per-example gradients, from one backward pass over the whole batch.

A linear module's gradient is the sum over positions of (gradient of its output) x (its input), an embedding's the
gradient of its output at each token's row, and a norm's likewise. Inputs and gradients of outputs are tapped, and
each example's norm follows from them without its gradient being formed (Goodfellow 2015, "Efficient per-example
gradient computations"; Li et al. 2022, "ghost clipping"; Bu et al. 2023 form the sum from the same two). Sums are
fp32 over what the examples contribute one by one, also where the model computes in bf16: no rounding of a sum lets
one example move it further than the clip.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Parameters = Mapping[str, nn.Parameter]
Rows = Mapping[str, torch.Tensor]
MATRICES = (nn.Linear, Conv1D)
TAPPED = (*MATRICES, nn.Embedding, nn.LayerNorm)
"""Modules whose per-example gradients follow from their inputs and the gradients of their outputs."""
MIXING = (nn.modules.batchnorm._BatchNorm,)
"""Modules that let one example's output depend on the others'."""


@dataclass
class Call:
    """One use of a module.

    Attributes:
        module: which.
        inputs: what it was given.
        output: where its output stands in autograd's graph.
        gradient: the loss's by its output; None until the backward pass.
    """

    module: nn.Module
    inputs: torch.Tensor
    output: GradientEdge
    gradient: torch.Tensor | None = None


@dataclass
class Uses:
    """How one trained parameter was used, every tensor ``[B, T, ·]`` by example.

    Attributes:
        matrix: (inputs, gradients of outputs) of a matrix; ``turned`` where the parameter is ``[in, out]``.
        rows: (tokens ``[B, T]``, gradients) of an embedding table.
        vectors: what each position adds to a bias, or to a norm's weight.
    """

    matrix: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    turned: bool = False
    rows: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    vectors: list[torch.Tensor] = field(default_factory=list)


def mixing_module(model: nn.Module) -> str | None:
    """The name of a module that mixes the examples of a batch, if there is one."""
    return next((name for name, module in model.named_modules() if isinstance(module, MIXING)), None)


def tappable(model: nn.Module, trained: Parameters) -> bool:
    """Whether every trained parameter stands in a module of :data:`TAPPED`."""
    modules = (module for module in model.modules() if isinstance(module, TAPPED))
    found = {id(parameter) for module in modules for parameter in _direct(module)}
    return {id(parameter) for parameter in trained.values()} <= found


def _direct(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


@contextmanager
def tapped(model: nn.Module, trained: Parameters, examples: int) -> Iterator[list[Call]]:
    """Inside, every use of a module with trained parameters is recorded.

    Args:
        model: the model.
        trained: its trained parameters.
        examples: number of examples in the batch.
    """
    calls: list[Call] = []
    wanted = {id(parameter) for parameter in trained.values()}

    def tap(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not output.requires_grad:
            return None
        given = inputs[0].detach()
        changed = None
        if isinstance(module, nn.Embedding) and len(given) == 1 and examples > 1:
            given = given.expand(examples, *given.shape[1:])  # positions, looked up once for all examples
            changed = output = output.expand(examples, *output.shape[1:])
        calls.append(Call(module, given, get_gradient_edge(output)))
        return changed

    modules = [module for module in model.modules() if isinstance(module, TAPPED)]
    handles = [
        module.register_forward_hook(tap)
        for module in dict.fromkeys(modules)
        if wanted & set(map(id, _direct(module)))
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def backward(
    loss: torch.Tensor, calls: list[Call], trained: Parameters = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """The backward pass: gradients of the calls' outputs, and of ``trained`` parameters, if they are wanted.

    Without the latter, none of the products that form a parameter's gradient is computed.

    Args:
        loss: a scalar.
        calls: what :func:`tapped` recorded; their gradients are set.
        trained: parameters whose own gradients are returned.

    Returns:
        Parameter name -> autograd's gradient, fp32.
    """
    wanted: Any = [*(call.output for call in calls), *trained.values()]
    if not wanted or not loss.requires_grad:
        return zeros(trained)
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    for call, gradient in zip(calls, found, strict=False):
        call.gradient = gradient
    own = zip(trained.items(), found[len(calls) :], strict=True)
    return {
        name: torch.zeros_like(p, dtype=torch.float32) if gradient is None else gradient.float()
        for (name, p), gradient in own
    }


def add_clipped(
    total: Rows,
    trained: Parameters,
    calls: list[Call],
    owners: torch.Tensor | None,
    weights: torch.Tensor,
    clip: float,
    still: Rows = MappingProxyType({}),
) -> torch.Tensor:
    """Add per-example gradients, each at most ``clip`` long, to a sum.

    Args:
        total: parameter name -> sum, fp32; changed in place.
        trained: the trained parameters.
        calls: what :func:`tapped` recorded, after the backward pass.
        owners: the example of each position that a head was given alone, ``[n]``; None where there is none.
        weights: factor of each example's gradient before it is clipped, ``[B]``.
        clip: the longest norm.
        still: trained table or bias -> its rows that stay as they are: they count in no norm, and their sum is 0.

    Returns:
        The norms before they are clipped, ``[B]``.
    """
    uses = _uses(trained, calls, owners, len(weights), still)
    squares = torch.zeros(len(weights), device=weights.device)
    for use in uses.values():
        squares = squares + _squares(use, len(weights))
    norms = weights * squares.clamp(min=0).sqrt()
    factors = weights * (clip / norms.clamp(min=clip))
    for name, use in uses.items():
        _add_weighted(total[name], use, factors)
    return norms


def whole_sum(
    trained: Parameters, calls: list[Call], owners: torch.Tensor | None, examples: int
) -> dict[str, torch.Tensor]:
    """The sum of per-example gradients as they are: what autograd gives where nothing was overlooked."""
    total = zeros(trained)
    ones = torch.ones(examples, device=next(iter(trained.values())).device)
    for name, use in _uses(trained, calls, owners, examples).items():
        _add_weighted(total[name], use, ones)
    return total


def zeros(trained: Parameters) -> dict[str, torch.Tensor]:
    """An empty sum of gradients: parameter name -> zeros of its shape, fp32."""
    return {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in trained.items()}


def _uses(
    trained: Parameters,
    calls: list[Call],
    owners: torch.Tensor | None,
    examples: int,
    still: Rows = MappingProxyType({}),
) -> dict[str, Uses]:
    names = {id(parameter): name for name, parameter in trained.items()}
    uses: defaultdict[str, Uses] = defaultdict(Uses)
    for call in calls:
        module = call.module
        if call.gradient is None:
            continue  # nothing of the loss depends on it
        inputs = _by_example(call.inputs, owners, examples, isinstance(module, nn.Embedding))
        gradient = _by_example(call.gradient.float(), owners, examples)
        weight, bias = (names.get(id(getattr(module, key, None))) for key in ("weight", "bias"))
        if bias is not None:
            uses[bias].vectors.append(_without(gradient, still.get(bias)))
        if weight is None:
            continue
        if isinstance(module, MATRICES):
            uses[weight].matrix.append((inputs.float(), _without(gradient, still.get(weight))))
            uses[weight].turned = isinstance(module, Conv1D)
        elif isinstance(module, nn.Embedding):
            if module.padding_idx is not None:
                gradient = gradient * (inputs != module.padding_idx)[:, :, None]
            if weight in still:
                gradient = gradient * ~torch.isin(inputs, still[weight])[:, :, None]
            uses[weight].rows.append((inputs, gradient))
        else:
            assert isinstance(module, nn.LayerNorm)
            normed = functional.layer_norm(inputs.float(), module.normalized_shape, eps=module.eps)
            uses[weight].vectors.append(gradient * normed)
    return {name: uses[name] for name in trained}


def _without(gradient: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The gradient of an output whose elements ``rows`` count for nothing."""
    return gradient if rows is None else gradient.index_fill(-1, rows, 0.0)


def _by_example(
    tensor: torch.Tensor, owners: torch.Tensor | None, examples: int, tokens: bool = False
) -> torch.Tensor:
    """``[B, T, ·]``, of tokens ``[B, T]``: of itself, of ``[B, ·]``, or of positions ``[1, n, ·]`` by owner."""
    if tokens:
        return tensor.reshape(examples, -1)
    if len(tensor) == examples:
        return tensor.reshape(examples, -1, tensor.shape[-1])
    if owners is None or len(tensor) != 1 or tensor.shape[1] != len(owners):
        raise ValueError(f"a batch of {examples} examples went through a module as {tuple(tensor.shape)}")
    counts = torch.bincount(owners, minlength=examples)
    places = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners]
    found = tensor.new_zeros(examples, max(1, int(counts.max())), tensor.shape[-1])
    found[owners, places] = tensor[0]
    return found


def _squares(use: Uses, examples: int) -> torch.Tensor:
    """Squared norms of the examples' gradients by one parameter, ``[B]``."""
    total: torch.Tensor | float = 0.0
    if use.matrix:
        inputs, gradient = (torch.cat(tensors, 1) for tensors in zip(*use.matrix, strict=True))
        wide, tall, long = inputs.shape[2], gradient.shape[2], inputs.shape[1]
        if long * (wide + tall) < wide * tall:
            total = total + ((inputs @ inputs.mT) * (gradient @ gradient.mT)).sum((1, 2))
        else:
            total = total + (gradient.mT @ inputs).square().sum((1, 2))
    if use.rows:
        tokens, by_row = (torch.cat(tensors, 1) for tensors in zip(*use.rows, strict=True))
        same = tokens[:, :, None] == tokens[:, None]
        total = total + ((by_row @ by_row.mT) * same).sum((1, 2))
        if use.matrix:  # a table that is also the decoder's matrix
            at = tokens[:, None].expand(-1, gradient.shape[1], -1)
            total = total + 2 * (gradient.gather(2, at) * (inputs @ by_row.mT)).sum((1, 2))
    if use.vectors:
        total = total + sum(vector.sum(1) for vector in use.vectors).square().sum(1)  # type: ignore[union-attr]
    if isinstance(total, float):
        return torch.zeros(examples)
    return total


def _add_weighted(total: torch.Tensor, use: Uses, factors: torch.Tensor) -> None:
    """Add the examples' gradients by one parameter, each times its factor, to a sum."""
    for inputs, gradient in use.matrix:
        scaled, given = (gradient * factors[:, None, None]).flatten(0, 1), inputs.flatten(0, 1)
        total.addmm_(given.T, scaled) if use.turned else total.addmm_(scaled.T, given)
    for tokens, by_row in use.rows:
        total.index_add_(0, tokens.flatten(), (by_row * factors[:, None, None]).flatten(0, 1))
    for vector in use.vectors:
        total += (vector.sum(1) * factors[:, None]).sum(0)
