"""Parts: a disjoint, complete division of a model's tensors into what a plan can train, send and keep.

    embeddings     everything below the first layer
    layer.0 …      the stack of equal layers, one part each
    adapter.0 …    what is trained of a layer in its place, where the model has adapters
    pooler         the pooler, where the model has one
    head           everything above: final norm, MLM head or classifier

A part is known by its kind and depth; its name is only a name. Parts are found in a model by
:mod:`fedstrata.models.parts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fedstrata.plan.kinds import PartKind


@dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        name: what plans, messages and records call it.
        kind: what it is.
        depth: index of its layer, from the bottom; None where it belongs to no layer.
        shapes: tensor name -> shape, in the model's order.
        linear: weight elements of each of its linear modules in order, where they multiply (a tied decoder counts
            in ``head``): the forward pass costs 2 FLOPs per element and position.
        norm_first: its input goes through a norm of its own before any linear module.
    """

    name: str
    kind: PartKind
    depth: int | None
    shapes: Mapping[str, tuple[int, ...]]
    linear: tuple[int, ...] = ()
    norm_first: bool = False

    @cached_property
    def elements(self) -> int:
        """Number of elements of its tensors."""
        return sum(map(math.prod, self.shapes.values()))


@dataclass(frozen=True)
class Parts:
    """The parts of one model; together they cover every parameter exactly once.

    Attributes:
        each: the parts, in the model's order.
        stack: dotted path of the module list that holds the layers, such as ``bert.encoder.layer``.
        tied: those of the head's linear elements whose weight lives in ``embeddings``.
        hidden: width of the hidden states.
        head_layers: layers that the head has of its own, which see every token: the weight elements of each one's
            linear modules.
        chained: those layers stand on one another, not each on a hidden state alone.
        architecture: the architecture's name in Hugging Face's configs.
    """

    each: tuple[Part, ...]
    stack: str
    tied: int
    hidden: int
    head_layers: tuple[int, ...] = ()
    chained: bool = False
    architecture: str = ""
    by_name: Mapping[str, Part] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {part.name: part for part in self.each})

    def __getitem__(self, name: str) -> Part:
        return self.by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All parts, from the embeddings up."""
        return tuple(self.by_name)

    @cached_property
    def shapes(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Part -> tensor name -> shape."""
        return {part.name: part.shapes for part in self.each}

    @cached_property
    def _layers(self) -> Mapping[int, Part]:
        return {part.depth: part for part in self.each if part.kind == "layer" and part.depth is not None}

    @cached_property
    def _adapters(self) -> Mapping[int | None, Part]:
        return {part.depth: part for part in self.each if part.kind == "adapter"}

    @cached_property
    def without_adapters(self) -> Parts:
        """The same parts but for the adapters; themselves where there are none."""
        if not self._adapters:
            return self
        return replace(self, each=tuple(part for part in self.each if part.kind != "adapter"))

    @cached_property
    def depth(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def layer(self, index: int) -> str:
        """The name of the layer at ``index``, from the bottom."""
        return self._layers[index].name

    def layers(self, start: int, stop: int | None = None) -> tuple[str, ...]:
        """The names of the layers from ``start`` up to, not including, ``stop``."""
        return tuple(map(self.layer, range(start, self.depth if stop is None else stop)))

    def depths(self, names: Iterable[str]) -> tuple[int, ...]:
        """The depths of those of the named parts that belong to a layer, ascending, each once."""
        found = (self.by_name[name].depth for name in names)
        return tuple(sorted({depth for depth in found if depth is not None}))

    def elements(self, names: Iterable[str]) -> int:
        """Number of elements of the named parts together."""
        return sum(self.by_name[name].elements for name in names)

    def records(self) -> list[dict[str, Any]]:
        """The parts in the model's order as a run's records have them: name, kind, depth, and bytes in fp32."""
        return [
            {"name": part.name, "kind": part.kind, "depth": part.depth, "bytes": 4 * part.elements}
            for part in self.each
        ]

    def adapted(self, names: Iterable[str]) -> tuple[str, ...]:
        """What stands for the named parts in training: of a layer its adapter, where the model has adapters.

        Embeddings then stay as they are, unless an adapter without depth stands for them.
        """
        if not self._adapters:
            return tuple(names)
        made = []
        for part in map(self.__getitem__, names):
            if part.kind in ("layer", "embeddings"):
                made += [self._adapters[part.depth].name] if part.depth in self._adapters else []
            else:
                made.append(part.name)
        return tuple(dict.fromkeys(made))
