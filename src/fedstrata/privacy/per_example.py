"""Clipped sums of per-example gradients, from one backward pass over the whole batch.

A linear module's gradient is the sum over positions of (gradient of its output) x (its input), an embedding's the
gradient of its output at each token's row, and a norm's likewise. Inputs and gradients of outputs are tapped, and
each example's norm follows from them without its gradient being formed (Goodfellow 2015, "Efficient per-example
gradient computations"; Li et al. 2022, "ghost clipping"; Bu et al. 2023 form the sum from the same two).

Sums are fp32 over what the examples contribute one by one, also where the model computes in bf16. Let M be the sum
of the lengths of what an example's positions add to its gradient. Rounding takes its squared norm off by k M^2,
which matters where the positions cancel: k was 1e-8 at most where it was measured, and 4e-6 is to be expected at
worst of products of 4,000 terms (2^-24 times their root: Higham and Mary 2019). Where no more than
:data:`CANCELED` of M is left, the example's gradient is formed by itself and clipped by its own norm: what is
clipped is what is added. Of the others one may move a sum further than the clip by k / CANCELED^2 / 2, which is
0.5 % of it.

An example whose gradient is not finite adds nothing. No noise hides infinity: with weights that overflow whoever
sends them would see which words there are by where the sum is no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fedstrata.privacy.noise import norm_of
from fedstrata.privacy.uses import MATRICES, Call, Parameters, Rows, Uses, add_weighted, lengths, uses_of

TAPPED = (*MATRICES, nn.Embedding, nn.LayerNorm)
"""Modules whose per-example gradients follow from their inputs and the gradients of their outputs."""
CANCELED = 0.02
"""What is left of the sum of its positions' lengths where an example's gradient is formed by itself."""
TINY = 2.0**-64
"""Factor below which a gradient is scaled in two steps."""
MIXING = (nn.modules.batchnorm._BatchNorm,)
"""Modules that let one example's output depend on the others'."""


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
        The norms before they are clipped, ``[B]``; not finite where an example added nothing.

    Raises:
        ValueError: what was tapped is not by example; nothing has been added.
    """
    uses = uses_of(trained, calls, owners, len(weights), still)
    squares, reach = torch.zeros(2, len(weights), device=weights.device)
    for use in uses.values():
        one, other = lengths(use)
        squares, reach = squares + one, reach + other
    norms = weights * squares.clamp(min=0).sqrt()
    lost = ~(squares + norms).isfinite()
    if lost.any():
        uses, norms = {name: use.without(lost) for name, use in uses.items()}, norms.masked_fill(lost, math.inf)
    canceled = (squares <= CANCELED**2 * reach) & ~lost
    factors = (weights * (clip / norms.clamp(min=clip))).masked_fill(canceled | lost, 0.0)
    for name, use in uses.items():
        add_weighted(total[name], use, factors)
    for example in canceled.nonzero().flatten().tolist():
        own = {name: use.of(example) for name, use in uses.items()}
        norms[example] = _add_alone(total, own, weights[example, None], clip)
    return norms  # type: ignore[no-any-return]


def _add_alone(total: Rows, uses: dict[str, Uses], weight: torch.Tensor, clip: float) -> float:
    """Add one example's gradient, formed by itself, at most ``clip`` long; its norm before."""
    own = {name: torch.zeros_like(total[name]) for name in uses}
    for name, use in uses.items():
        add_weighted(own[name], use, weight)
    norm = norm_of(own.values())
    add_whole(total, own, norm, clip)
    return norm


def add_whole(total: Rows, own: Rows, norm: float, clip: float) -> None:
    """Add one example's gradient of this norm, at most ``clip`` long, to a sum; nothing where it is not finite."""
    if math.isfinite(norm):
        factor = min(1.0, clip / max(norm, 1e-30))
        size = 1.0 if factor > TINY else TINY  # a power of two; a factor far below it has no digits in fp32
        for name, gradient in own.items():
            total[name].add_(gradient if size == 1 else gradient * size, alpha=factor / size)


def whole_sum(
    trained: Parameters, calls: list[Call], owners: torch.Tensor | None, examples: int
) -> dict[str, torch.Tensor]:
    """The sum of per-example gradients as they are: what autograd gives where nothing was overlooked."""
    total = zeros(trained)
    ones = torch.ones(examples, device=next(iter(trained.values())).device)
    for name, use in uses_of(trained, calls, owners, examples).items():
        add_weighted(total[name], use, ones)
    return total


def by_example(calls: list[Call], owners: torch.Tensor | None, examples: int, alone: list[Call], own: int) -> bool:
    """Whether what was tapped is by example, and not as long as the batch by chance.

    A table of relative positions ``[S, S]``, looked up once for all texts, looks like one of S texts; but for a
    single text it is as long.

    Args:
        calls: of a batch, after the backward pass.
        owners: the example of each position that a head was given alone; None where there is none.
        examples: number of examples in the batch.
        alone: the same of one of these examples, as wide.
        own: how many of ``owners`` are that one's.
    """
    if [call.module for call in calls] != [call.module for call in alone]:
        return False
    for whole, single in zip(calls, alone, strict=True):
        shape = whole.inputs.shape
        if len(shape) and shape[0] == examples:
            expected: tuple[int, ...] = (1, *shape[1:])
        elif owners is not None and shape[:2] == (1, len(owners)):
            expected = (1, own, *shape[2:])
        else:
            expected = (-1,)
        if whole.gradient is not None and single.inputs.shape != expected:
            return False
    return True


def zeros(trained: Parameters) -> dict[str, torch.Tensor]:
    """An empty sum of gradients: parameter name -> zeros of its shape, fp32."""
    return {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in trained.items()}
