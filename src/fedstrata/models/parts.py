"""Finds the parts of a model in its architecture.

A tied tensor lives in one part only, where it is first met, from the base up: MLM's decoder is in ``embeddings``.
Of an adapter the factors that are trained are parts of their own; an A that stays as it is belongs to its layer.
No weights are read, so a model on the ``meta`` device, made from a config alone, works as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from fedstrata.errors import UserError
from fedstrata.models.adapter_names import BASE, AdapterConfig, factor_of
from fedstrata.models.configs import with_adapters
from fedstrata.plan.kinds import Factors, PartKind, Tensors
from fedstrata.plan.parts import Lowest, Part, Parts
from fedstrata.plan.sharing import POSITIONS, Sharing

LINEAR = (nn.Linear, Conv1D)
"""Modules that multiply; GPT-2's Conv1D holds its weight as ``[in, out]``."""


@dataclass(frozen=True)
class _Key:
    """A part before its tensors are known: kind and depth."""

    kind: PartKind
    depth: int | None = None
    factors: Factors = "both"
    above: int = 0

    @property
    def name(self) -> str:
        place = () if self.depth is None else (str(self.depth),)
        factors = () if self.factors == "both" else (self.factors,)
        return ".".join([self.kind, *place, *factors, *([f"above{self.above}"] if self.above else [])])


HEAD = _Key("head")


@dataclass(frozen=True)
class Division:
    """Which part a tensor or module belongs to, by its dotted name."""

    prefix: str
    stack: str
    below: frozenset[str]
    """Children of the base model that come before its stack of layers, or hold it."""
    adapter: AdapterConfig | None = None

    def key(self, name: str) -> _Key:
        """The part of a tensor, or of the linear module of this name."""
        place, merge = self.place(name), self.adapter and self.adapter.merge
        if merge == "exact" and name.endswith(f"{BASE}.weight"):
            return _Key("base", place.depth)
        factor = self.adapter and factor_of(name, self.adapter)
        if not factor or (factor.letter == "a" and merge == "freeze_a"):
            return place
        letter = factor.letter if merge in ("alternate", "freeze_a") else "both"
        return _Key("adapter", place.depth, letter, factor.above)

    def place(self, name: str) -> _Key:
        """The layer, or what else of the model, a tensor or module stands in."""
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
        lowest: part -> what it saves in the lowest layer whose adapter learns.
        tied: linear elements of the head whose weight lives elsewhere.
        head_layers: layer of the head -> weight elements of its linear modules.
    """

    linear: dict[_Key, list[int]] = field(default_factory=dict)
    first: dict[_Key, nn.Module] = field(default_factory=dict)
    lowest: dict[_Key, Lowest] = field(default_factory=dict)
    tied: int = 0
    head_layers: dict[str, int] = field(default_factory=dict)


def find_parts(model: Any, adapter: AdapterConfig | None = None) -> Parts:
    """The parts of a Hugging Face encoder, or GPT-2, with a task head.

    Args:
        model: the model, as its class makes it: what takes no gradient is fixed.
        adapter: the adapters that were put into it, beside which nothing else of the encoder is trained.

    Raises:
        UserError: the model's base has no single stack of ``config.num_hidden_layers`` layers.
    """
    division = replace(divide(model), adapter=adapter)
    base_first(model)
    shapes: dict[_Key, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.named_parameters():
        shapes.setdefault(division.key(name), {})[name] = tuple(tensor.shape)
    modules = _modules(model, division, shapes)
    fixed = frozenset() if adapter else frozenset(fixed_tensors(model))
    if not modules.linear.get(_Key("layer", 0)):
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
                factors=key.factors,
                above=key.above,
                lowest=modules.lowest.get(key, Lowest()),
            )
            for key in _in_order(shapes, model.config.num_hidden_layers)
        ),
        stack=division.stack,
        tied=modules.tied,
        hidden=model.config.hidden_size,
        words=word_table(model),
        head_layers=tuple(modules.head_layers.values()),
        chained=getattr(model, "chained", False),
        architecture=model.config.model_type,
        ranks=adapter.by_client if adapter else {},
        fixed=fixed,
        sharing=Sharing(fixed),
    )


def fixed_tensors(model: Any) -> list[str]:
    """What a model's class never trains: tables of sines. DistilBERT's freezes a copy of its own."""
    sines = getattr(model.config, "sinusoidal_pos_embds", False)
    return [n for n, own in model.named_parameters() if not own.requires_grad or (sines and POSITIONS.search(n))]


def base_first(model: Any) -> None:
    """Let a model's base stand before its head: a tensor of both is called after its place in the base.

    XLM-RoBERTa and CamemBERT have the head first, in which the table of words would be, by the decoder's name.
    """
    children = model._modules
    for name in [name for name in children if name != model.base_model_prefix]:
        children[name] = children.pop(name)


def word_table(model: Any) -> str:
    """The name of the table with a row for each token; empty where there is none: CANINE hashes characters."""
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return ""
    return next((name for name, parameter in model.named_parameters() if parameter is table), "")


def _in_order(keys: Collection[_Key], depth: int) -> list[_Key]:
    """The parts of a model with so many layers, from the embeddings up."""
    own = sorted((key for key in keys if key.kind == "adapter"), key=lambda key: (key.above, key.factors))
    stack = [key for i in range(depth) for key in (_Key("layer", i), _Key("base", i), *_beside(own, i))]
    every = (_Key("embeddings"), *_beside(own, None), *stack, _Key("pooler"), HEAD)
    return [key for key in every if key in keys]


def _beside(adapters: Iterable[_Key], depth: int | None) -> list[_Key]:
    return [key for key in adapters if key.depth == depth]


def part_tensors(model: nn.Module, parts: Parts, names: Iterable[str]) -> Tensors:
    """The model's own tensors of the named parts (no copies)."""
    return {tensor: model.get_parameter(tensor).detach() for part in names for tensor in parts.shapes[part]}


def divide(model: Any) -> Division:
    """How a model's names divide it.

    Raises:
        UserError: see :func:`find_parts`.
    """
    prefix: str = model.base_model_prefix
    base = getattr(model, prefix, model)
    depth = model.config.num_hidden_layers
    stacks = [
        name for name, module in base.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if hasattr(model, "peft_config"):
        raise with_adapters(model.config.name_or_path)
    if base is model:
        raise UserError(f"model {type(model).__name__}: has no task head over a base model")
    if len(stacks) != 1:
        raise UserError(
            f"model {type(model).__name__}: found {len(stacks)} stacks of {depth} layers in its base model, need "
            "exactly one; expected a model built like BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT or GPT-2"
        )
    children = [name for name, _ in base.named_children()]
    holder = children.index(stacks[0].split(".")[0])
    return Division(prefix, f"{prefix}.{stacks[0]}", frozenset(children[: holder + 1]))


def _modules(model: Any, division: Division, shapes: Mapping[_Key, Mapping[str, Any]]) -> _Modules:
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
            found.tied += module.weight.numel() * (key == HEAD and f"{name}.weight" not in shapes.get(key, ()))
    if branches > 1:  # a shared pooler or classifier runs once per branch
        found.linear[_Key("pooler")] = found.linear.get(_Key("pooler"), []) * branches
        found.linear[HEAD] = found.linear[HEAD] * (branches // len(found.linear[HEAD]))
    if division.adapter:
        _adapter_modules(model, division, found)
    return found


def _adapter_modules(model: Any, division: Division, found: _Modules) -> None:
    """Complete the modules of a model with adapters."""
    assert division.adapter is not None
    for name, tensor in model.named_parameters():
        factor = factor_of(name, division.adapter)
        if factor and "lora_embedding_B" in name:  # multiplies; the A of an embedding is looked up
            found.linear.setdefault(division.key(name), []).append(tensor.numel())
            found.lowest[division.key(name)] = Lowest(inner=tensor.numel())
    for depth in range(model.config.num_hidden_layers):
        layer = model.get_submodule(f"{division.stack}.{depth}")
        path = f"{division.stack}.{depth}."
        linear = {path + name: own for name, own in layer.named_modules() if isinstance(own, LINEAR)}
        for key, lowest in _lowest(linear, division, _input_elements(model.config)).items():
            found.lowest[key] = lowest


def _input_elements(config: Any) -> int:
    """Elements of the modules that take a layer's input: Q, K and V, of which K and V may have fewer heads."""
    heads = config.num_attention_heads
    own = getattr(config, "head_dim", None) or config.hidden_size // heads
    less = getattr(config, "num_key_value_heads", None) or heads
    return int(config.hidden_size * own * (heads + 2 * less))


def _lowest(linear: Mapping[str, Any], division: Division, entry: int) -> dict[_Key, Lowest]:
    """What the parts of one layer save where it is the lowest whose adapters learn.

    Args:
        linear: the layer's linear modules by name, in order.
        division: the model's.
        entry: elements of the modules that take the layer's input, apart or in one.
    """
    assert division.adapter is not None
    factors = {name: factor_of(name, division.adapter) for name in linear}
    adapted = {factor.module for factor in factors.values() if factor}
    group, level, wide = {}, 0, 0  # module -> 0 for those that take the input, then 1, 2, …
    sizes = {name: module.weight.numel() for name, module in linear.items()}
    plain = [name for name, factor in factors.items() if factor is None]
    for name in plain:
        level += wide >= entry
        group[name.removesuffix(BASE)] = level
        wide += sizes[name]
    bottom = min((group[name] for name in adapted), default=0)
    inputs: dict[_Key, int] = {}
    inner: dict[_Key, int] = {}
    for name, factor in factors.items():
        key, module = division.key(name), factor.module if factor else name.removesuffix(BASE)
        if group[module] <= bottom:
            into = inner if factor and factor.letter == "b" else inputs
            into[key] = into.get(key, 0) + sizes[name]
    first = [module in adapted for module, at in group.items() if at == 0]
    products = _products(*first) if len(first) == 3 else 4  # of attention that is put together otherwise, all
    products = products if bottom == 0 else 0
    return {
        key: Lowest(inputs.get(key, 0), inner.get(key, 0), products if key.kind == "layer" else 4)
        for key in inputs.keys() | inner.keys()
    }


def _products(q: bool, k: bool, v: bool) -> int:
    """Of attention's four products going back, those computed where only these of Q, K and V learn."""
    return q + k + (q or k) + v
