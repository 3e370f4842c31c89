"""Parts: a disjoint, complete division of a model's tensors into what a plan can train, send and keep.

    embeddings     everything below the first layer
    layer.0 …      the stack of equal layers, one part each
    base.0 …       the matrices under a layer's adapters, where merging moves them
    adapter.0 …    what is trained of a layer in its place, where the model has adapters; in several parts where
                   their factors, or ranks, are trained apart
    pooler         the pooler, where the model has one
    head           everything above: final norm, MLM head or classifier

A part is known by its kind and depth; its name is only a name. Parts are found in a model by
:mod:`fedstrata.models.parts`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fedstrata.plan.kinds import Factors, PartKind
from fedstrata.plan.sharing import EVERYTHING, Sharing


@dataclass(frozen=True)
class Lowest:
    """What of a part needs no gradient where its frozen layer is the lowest whose adapter learns.

    Attributes:
        inputs: weight elements of its linear modules that take what nothing below can learn from.
        inner: weight elements of its B factors that take an A factor of such an input: likewise, unless A learns.
        products: of attention's four products going back, how many are computed.
    """

    inputs: int = 0
    inner: int = 0
    products: int = 4


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
        factors: of an adapter: what it holds of the products B A.
        above: of an adapter: the rank above which it lies; a client of this rank or a lower one never trains it.
        lowest: of a layer with adapters, and of its adapters.
    """

    name: str
    kind: PartKind
    depth: int | None
    shapes: Mapping[str, tuple[int, ...]]
    linear: tuple[int, ...] = ()
    norm_first: bool = False
    factors: Factors = "both"
    above: int = 0
    lowest: Lowest = Lowest()

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
        words: name of the table with a row for each token; empty where there is none.
        head_layers: layers that the head has of its own, which see every token: the weight elements of each one's
            linear modules.
        chained: those layers stand on one another, not each on a hidden state alone.
        architecture: the architecture's name in Hugging Face's configs.
        ranks: client -> the rank of its adapters, and ``default``; empty where all have the same.
        fixed: tensors that never change, such as a table of sines: nobody trains or sends them.
        sharing: what of them never travels, and how often the rest does.
    """

    each: tuple[Part, ...]
    stack: str
    tied: int
    hidden: int
    words: str = ""
    head_layers: tuple[int, ...] = ()
    chained: bool = False
    architecture: str = ""
    ranks: Mapping[str, int] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    sharing: Sharing = EVERYTHING
    by_name: Mapping[str, Part] = field(init=False, repr=False, compare=False)
    sent_before: dict[Any, list[Counter[int | None]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Method, task and streams -> for each round, how often each layer was sent in the rounds before it."""
    turns: dict[Any, Mapping[str, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Method, task and streams -> the turn of each part, where parts are sent in turns."""

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
    def _adapters(self) -> Mapping[int | None, tuple[Part, ...]]:
        found: dict[int | None, tuple[Part, ...]] = {}
        for part in self.each:
            if part.kind == "adapter":
                found[part.depth] = (*found.get(part.depth, ()), part)
        return found

    @cached_property
    def alternate(self) -> bool:
        """The factors of the adapters are trained and sent in turns."""
        return {"a", "b"} <= {part.factors for own in self._adapters.values() for part in own}

    def adapters_of(self, depth: int | None) -> tuple[Part, ...]:
        """The adapters of a layer, or of the embeddings: those without depth."""
        return self._adapters.get(depth, ())

    def rank_of(self, client: str) -> int | None:
        """The rank of a client's adapters; None where all have the same."""
        return self.ranks.get(client, self.ranks["default"]) if self.ranks else None

    @cached_property
    def without_adapters(self) -> Parts:
        """The same parts but for the adapters; themselves where there are none."""
        if not self._adapters:
            return self
        return replace(self, each=tuple(part for part in self.each if part.kind not in ("adapter", "base")))

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

    def travelling(self, name: str) -> int:
        """Number of elements of a part that travel."""
        return self.sharing.elements(self[name].shapes)

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
        made: list[str] = []
        for part in map(self.__getitem__, names):
            if part.kind in ("layer", "embeddings"):
                made += [adapter.name for adapter in self.adapters_of(part.depth)]
            else:
                made.append(part.name)
        return tuple(dict.fromkeys(made))

    def word_factors(self, names: Iterable[str]) -> list[str]:
        """Of tensors with these names the A of an adapter of the table of tokens, with a column for each."""
        table = self.words.removesuffix(".weight").removesuffix(".base_layer")
        return [name for name in names if table and name.startswith(f"{table}.lora_embedding_A.")]

    def at_depths_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """All parts of the layers that these parts belong to, in the model's order."""
        depths = self.depths(names)
        return tuple(part.name for part in self.each if part.depth in depths)
