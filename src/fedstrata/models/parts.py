"""Finds the parts of a model in its architecture.

A tied tensor lives in one part only, the one where it is first met: the MLM decoder matrix is in ``embeddings``.
No weights are read, so a model on the ``meta`` device, made from a config alone, works as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from fedstrata.errors import UserError
from fedstrata.plan.kinds import PartKind, Tensors
from fedstrata.plan.parts import Part, Parts

LINEAR = (nn.Linear, Conv1D)
"""Modules that multiply; GPT-2's Conv1D holds its weight as ``[in, out]``."""


@dataclass(frozen=True)
class _Key:
    """A part before its tensors are known: kind and depth."""

    kind: PartKind
    depth: int | None = None

    @property
    def name(self) -> str:
        return self.kind if self.depth is None else f"{self.kind}.{self.depth}"


HEAD = _Key("head")


@dataclass(frozen=True)
class _Division:
    """Which part a tensor or module belongs to, by its dotted name."""

    prefix: str
    stack: str
    below: frozenset[str]
    """Children of the base model that come before its stack of layers, or hold it."""

    def key(self, name: str) -> _Key:
        if name.startswith(f"{self.stack}."):
            return _Key("layer", int(name[len(self.stack) + 1 :].split(".")[0]))
        if not name.startswith(f"{self.prefix}."):
            return HEAD
        child = name[len(self.prefix) + 1 :].split(".")[0]
        if child == "pooler":
            return _Key("pooler")
        return _Key("embeddings") if child in self.below else HEAD  # next to the stack: shared by its layers


@dataclass
class _Modules:
    """The linear modules of a model, by part.

    Attributes:
        linear: part -> weight elements of its linear modules, in order.
        first: part -> the first module that its input goes through.
        tied: linear elements of the head whose weight lives elsewhere.
        head_layers: layer of the head -> weight elements of its linear modules.
    """

    linear: dict[_Key, list[int]] = field(default_factory=dict)
    first: dict[_Key, nn.Module] = field(default_factory=dict)
    tied: int = 0
    head_layers: dict[str, int] = field(default_factory=dict)


def find_parts(model: Any) -> Parts:
    """The parts of a Hugging Face encoder, or GPT-2, with a task head.

    Raises:
        UserError: the model's base has no single stack of ``config.num_hidden_layers`` layers.
    """
    division = _divide(model)
    shapes: dict[_Key, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.named_parameters():
        shapes.setdefault(division.key(name), {})[name] = tuple(tensor.shape)
    modules = _modules(model, division, shapes)
    depth = model.config.num_hidden_layers
    layers = [_Key("layer", i) for i in range(depth)]
    if not modules.linear.get(layers[0]):
        raise UserError(
            f"model {type(model).__name__}: its layers hold no linear modules; expected an encoder like BERT"
        )
    return Parts(
        each=tuple(
            Part(
                name=key.name,
                kind=key.kind,
                depth=key.depth,
                shapes=shapes[key],
                linear=tuple(modules.linear.get(key, ())),
                norm_first=key in modules.first and not isinstance(modules.first[key], LINEAR),
            )
            for key in (_Key("embeddings"), *layers, _Key("pooler"), HEAD)
            if key in shapes
        ),
        stack=division.stack,
        tied=modules.tied,
        hidden=model.config.hidden_size,
        head_layers=tuple(modules.head_layers.values()),
        chained=getattr(model, "chained", False),
        architecture=model.config.model_type,
    )


def part_tensors(model: nn.Module, parts: Parts, names: Iterable[str]) -> Tensors:
    """The model's own tensors of the named parts (no copies)."""
    return {tensor: model.get_parameter(tensor).detach() for part in names for tensor in parts.shapes[part]}


def _divide(model: Any) -> _Division:
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
            "exactly one; expected a model built like BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT or GPT-2"
        )
    children = [name for name, _ in base.named_children()]
    holder = children.index(stacks[0].split(".")[0])
    return _Division(prefix, f"{prefix}.{stacks[0]}", frozenset(children[: holder + 1]))


def _modules(model: Any, division: _Division, shapes: Mapping[_Key, Mapping[str, Any]]) -> _Modules:
    found = _Modules()
    branches = getattr(model, "branches", 1)  # of a head that classifies several states
    for name, module in model.named_modules():
        key = division.key(name)
        leaf = not list(module.children()) and next(module.parameters(), None) is not None
        inside = name.startswith(f"{division.prefix}.")
        if leaf and (inside or isinstance(module, LINEAR)):  # ELECTRA's head declares its norm first
            found.first.setdefault(key, module)
        if isinstance(module, LINEAR) and branches > 1 and name.startswith("head.layers."):
            layer = name.split(".")[2]
            found.head_layers[layer] = found.head_layers.get(layer, 0) + module.weight.numel()
        elif isinstance(module, LINEAR):
            found.linear.setdefault(key, []).append(module.weight.numel())
            found.tied += module.weight.numel() * (f"{name}.weight" not in shapes.get(key, ()))
    if branches > 1:  # a shared pooler or classifier runs once per branch
        found.linear[_Key("pooler")] = found.linear.get(_Key("pooler"), []) * branches
        found.linear[HEAD] = found.linear[HEAD] * (branches // len(found.linear[HEAD]))
    return found
