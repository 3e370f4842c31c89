"""How an example used a parameter: what its gradient is made of, how long it is, and what it adds to a sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.linalg import vector_norm
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Parameters = Mapping[str, nn.Parameter]
Rows = Mapping[str, torch.Tensor]
MATRICES = (nn.Linear, Conv1D)


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

    def of(self, example: int) -> Uses:
        """The same of one example alone, ``[1, T, ·]``."""
        pairs = [[(a[example, None], b[example, None]) for a, b in kind] for kind in (self.matrix, self.rows)]
        return Uses(pairs[0], self.turned, pairs[1], [vector[example, None] for vector in self.vectors])

    def without(self, lost: torch.Tensor) -> Uses:
        """The same where some examples, ``[B]``, add zeros: a factor 0 leaves what is infinite no number."""
        away = lost[:, None, None]
        matrix = [(given.masked_fill(away, 0.0), own.masked_fill(away, 0.0)) for given, own in self.matrix]
        rows = [(tokens, own.masked_fill(away, 0.0)) for tokens, own in self.rows]
        return Uses(matrix, self.turned, rows, [vector.masked_fill(away, 0.0) for vector in self.vectors])


def uses_of(
    trained: Parameters,
    calls: list[Call],
    owners: torch.Tensor | None,
    examples: int,
    still: Rows = MappingProxyType({}),
) -> dict[str, Uses]:
    """How a batch's examples used each parameter that its loss depends on; arguments as of ``add_clipped``.

    Raises:
        ValueError: something went through a module that is not by example.
    """
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
    return {name: uses[name] for name in trained if name in uses}


def _without(gradient: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The gradient of an output whose elements ``rows`` count for nothing."""
    return gradient if rows is None else gradient.index_fill(-1, rows, 0.0)


def _by_example(
    tensor: torch.Tensor, owners: torch.Tensor | None, examples: int, tokens: bool = False
) -> torch.Tensor:
    """``[B, T, ·]``, of tokens ``[B, T]``: of itself, of ``[B, ·]``, or of positions ``[1, n, ·]`` by owner."""
    if len(tensor) == examples:
        return tensor.reshape(examples, -1) if tokens else tensor.reshape(examples, -1, tensor.shape[-1])
    if tokens or owners is None or tensor.shape[:2] != (1, len(owners)):
        raise ValueError(f"a batch of {examples} examples went through a module as {tuple(tensor.shape)}")
    counts = torch.bincount(owners, minlength=examples)
    places = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners]
    found = tensor.new_zeros(examples, max(1, int(counts.max())), tensor.shape[-1])
    found[owners, places] = tensor[0]
    return found


def lengths(use: Uses) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the examples' gradients by one parameter, ``[B]``, and what they were if nothing canceled.

    The latter is the square of the sum of the positions' own lengths: of a matrix (gradient) x (input). An example
    for which the former is far smaller is not known to more than that one's rounding.
    """
    total, reach, far = [], [], []
    if use.matrix:
        inputs, gradient = (torch.cat(tensors, 1) for tensors in zip(*use.matrix, strict=True))
        size = _power_of_two(inputs)
        inputs, gradient = inputs.div_(size), gradient.mul_(size)
        wide, tall, long = inputs.shape[2], gradient.shape[2], inputs.shape[1]
        if long * (wide + tall) < wide * tall:
            total.append(((inputs @ inputs.mT) * (gradient @ gradient.mT)).sum((1, 2)))
        else:
            total.append((gradient.mT @ inputs).square().sum((1, 2)))
        far.append((vector_norm(inputs, dim=2) * vector_norm(gradient, dim=2)).sum(1))
    if use.rows:
        tokens, by_row = (torch.cat(tensors, 1) for tensors in zip(*use.rows, strict=True))
        same, each = tokens[:, :, None] == tokens[:, None], vector_norm(by_row, dim=2)
        total.append(((by_row @ by_row.mT) * same).sum((1, 2)))
        far.append((each[:, :, None] * each[:, None] * same).sum((1, 2)).sqrt())
        if use.matrix:  # a table that is also the decoder's matrix
            at = tokens[:, None].expand(-1, gradient.shape[1], -1)
            total.append(2 * (gradient.gather(2, at) * (inputs @ by_row.mT)).sum((1, 2)))
    if far:
        reach.append(torch.stack(far).sum(0).square())
    if use.vectors:  # summed before they are added to others', so that their own rounding is in the norm
        total.append(torch.stack([vector.sum(1) for vector in use.vectors]).sum(0).square().sum(1))
        reach.append(total[-1])
    return torch.stack(total).sum(0), torch.stack(reach).sum(0)


def _power_of_two(rows: torch.Tensor) -> torch.Tensor:
    """One about as large as the largest number of each row, ``[..., 1]``, by which nothing is rounded.

    Weights can make inputs whose squares are 0 in fp32, and gradients as large as these are small: between the two
    a long gradient would seem short, and pass any clip.
    """
    _, exponent = torch.frexp(rows.abs().amax(-1, keepdim=True))
    return torch.ldexp(torch.ones_like(rows[..., :1]), exponent.clamp(-126, 127))


def add_weighted(total: torch.Tensor, use: Uses, factors: torch.Tensor) -> None:
    """Add the examples' gradients by one parameter, each times its factor, to a sum."""
    for inputs, gradient in use.matrix:
        size = _power_of_two(inputs)  # of huge ones gradients are tiny, and scaled they had no digits in fp32
        scaled, given = (gradient * size * factors[:, None, None]).flatten(0, 1), (inputs / size).flatten(0, 1)
        total.addmm_(given.T, scaled) if use.turned else total.addmm_(scaled.T, given)
    for tokens, by_row in use.rows:
        total.index_add_(0, tokens.flatten(), (by_row * factors[:, None, None]).flatten(0, 1))
    for vector in use.vectors:
        total += (vector.sum(1) * factors[:, None]).sum(0)
