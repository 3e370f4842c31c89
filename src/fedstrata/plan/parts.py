"""Parts: a disjoint, complete division of a model's tensors, found from its architecture.

    embeddings     everything below the first layer
    layer.0 …      the stack of equal layers, one part each
    pooler         the pooler, where the model has one
    head           everything above: final norm, MLM head or classifier

A tied tensor lives in one part only, the one where it is first met: the MLM decoder matrix is in ``embeddings``.
Nothing here reads a weight, so a model on the ``meta`` device, made from a config alone, serves as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedstrata.errors import UserError

Tensors = dict[str, torch.Tensor]
"""Tensors by the names they have in the model."""
LINEAR = (nn.Linear, Conv1D)
"""Modules that multiply; GPT-2's Conv1D holds its weight as ``[in, out]``."""


@dataclass(frozen=True)
class Parts:
    """The parts of one model.

    Attributes:
        shapes: part -> tensor name -> shape, in the model's order; covers every parameter exactly once.
        stack: dotted path of the module list that holds the layers, such as ``bert.encoder.layer``.
        linear: part -> weight elements of each of its linear modules in order, where they multiply (a tied
            decoder counts in ``head``): the forward pass costs 2 FLOPs per element and position.
        tied: those of the head's linear elements whose weight lives in ``embeddings``.
        norm_first: parts whose input goes through a norm of their own before any linear module.
        hidden: width of the hidden states.
        own: layers that the head has of its own, which see every token: the weight elements of each one's linear
            modules.
        chained: those layers stand on one another, not each on a hidden state alone.
        kind: the architecture's word in Hugging Face's configs.
    """

    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    stack: str
    linear: Mapping[str, tuple[int, ...]]
    tied: int
    norm_first: frozenset[str]
    hidden: int
    own: tuple[int, ...] = ()
    chained: bool = False
    kind: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All parts, from the embeddings up."""
        return tuple(self.shapes)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(name.startswith("layer.") for name in self.shapes)

    def layers(self, start: int, stop: int | None = None) -> tuple[str, ...]:
        """The parts ``layer.start`` … up to, not including, ``layer.stop``."""
        return tuple(f"layer.{i}" for i in range(start, self.depth if stop is None else stop))

    def elements(self, parts: Iterable[str]) -> int:
        """Number of elements of the named parts together."""
        return sum(math.prod(shape) for part in parts for shape in self.shapes[part].values())


def find(model: Any) -> Parts:
    """The parts of a Hugging Face encoder, or GPT-2, with a task head.

    Raises:
        UserError: the model's base has no single stack of ``config.num_hidden_layers`` layers.
    """
    prefix: str = model.base_model_prefix
    base = getattr(model, prefix, model)
    depth = model.config.num_hidden_layers
    stacks = [
        name for name, module in base.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if base is model:
        raise UserError(f"model {type(model).__name__}: has no task head over a base model")
    if len(stacks) != 1:
        raise UserError(
            f"model {type(model).__name__}: found {len(stacks)} stacks of {depth} layers in its base model, need "
            "exactly one; legal: models built like BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT or GPT-2"
        )
    stack = f"{prefix}.{stacks[0]}"
    before = [name for name, _ in base.named_children()]
    first = before.index(stacks[0].split(".")[0])

    def part(name: str) -> str:
        if name.startswith(f"{stack}."):
            return f"layer.{name[len(stack) + 1 :].split('.')[0]}"
        if not name.startswith(f"{prefix}."):
            return "head"
        child = name[len(prefix) + 1 :].split(".")[0]
        if child == "pooler":
            return "pooler"
        return "embeddings" if before.index(child) <= first else "head"  # beside the stack: shared by its layers

    order = ("embeddings", *(f"layer.{i}" for i in range(depth)), "pooler", "head")
    shapes: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in order}
    for name, tensor in model.named_parameters():
        shapes[part(name)][name] = tuple(tensor.shape)
    linear: dict[str, list[int]] = {name: [] for name in order}
    begins: dict[str, nn.Module] = {}  # what a part's input meets first
    tied = 0
    branches = getattr(model, "branches", 1)  # of a head that classifies several states
    own: dict[str, int] = {}
    for name, module in model.named_modules():
        leaf = not list(module.children()) and next(module.parameters(), None) is not None
        if leaf and (name.startswith(f"{prefix}.") or isinstance(module, LINEAR)):  # ELECTRA's head declares
            begins.setdefault(part(name), module)  # its norm first and applies it last
        if isinstance(module, LINEAR) and branches > 1 and name.startswith("head.layers."):
            layer = name.split(".")[2]
            own[layer] = own.get(layer, 0) + module.weight.numel()
        elif isinstance(module, LINEAR):
            linear[part(name)].append(module.weight.numel())
            tied += module.weight.numel() * (f"{name}.weight" not in shapes[part(name)])
    if not linear["layer.0"]:
        raise UserError(
            f"model {type(model).__name__}: its layers hold no linear modules; legal: encoders like BERT"
        )
    if branches > 1:  # a pooler or classifier that all share multiplies for each
        linear["pooler"] *= branches
        linear["head"] *= branches // len(linear["head"])
    present = [name for name in order if shapes[name]]
    return Parts(
        shapes={name: shapes[name] for name in present},
        stack=stack,
        linear={name: tuple(linear[name]) for name in present},
        tied=tied,
        norm_first=frozenset(name for name, module in begins.items() if not isinstance(module, LINEAR)),
        hidden=model.config.hidden_size,
        own=tuple(own.values()),
        chained=getattr(model, "chained", False),
        kind=model.config.model_type,
    )


def tensors(model: nn.Module, parts: Parts, names: Iterable[str]) -> Tensors:
    """The model's own tensors of the named parts (no copies)."""
    return {tensor: model.get_parameter(tensor).detach() for part in names for tensor in parts.shapes[part]}
