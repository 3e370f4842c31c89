"""How adapters are set up and what their tensors are called: by peft, beside the matrix that they add to.

    NAME.base_layer.weight                W, frozen
    NAME.lora_A.SEGMENT.weight            A, [rank, in]           of an embedding NAME.lora_embedding_A.SEGMENT
    NAME.lora_B.SEGMENT.weight            B, [out, rank]          likewise

Where ranks differ by client an adapter has several segments, each with the next components up to the next larger
rank: their sum is the adapter of the largest rank. Else there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from fedstrata.plan.kinds import Factors

FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<factor>[AB])\.(?P<segment>\w+)(?:\..+)?")
"""The name of a factor, or of the module that holds it."""
BASE = ".base_layer"
"""Stands in the names of what peft wraps."""
PLAIN = "default"
"""Segment of an adapter that has one."""


@dataclass(frozen=True)
class AdapterConfig:
    """A job's ``[adapter]`` of kind ``lora``, as values that can be compared and hashed.

    Attributes:
        ranks: (client or ``default``, rank), ``default`` included.
        alpha: the products are scaled by alpha over the largest rank.
        targets: ends of modules' names; None for the architecture's usual ones.
        dropout: of what goes into A.
        init: ``gaussian`` or ``svd``.
        merge: how the clients' products become one.
    """

    ranks: tuple[tuple[str, int], ...]
    alpha: float
    targets: tuple[str, ...] | None
    dropout: float
    init: str
    merge: str

    @property
    def rank(self) -> int:
        """The largest rank: that of the model."""
        return max(rank for _, rank in self.ranks)

    @property
    def scaling(self) -> float:
        """What the products are multiplied by; one number for all ranks, as they are parts of one model."""
        return self.alpha / self.rank

    @property
    def by_client(self) -> dict[str, int]:
        """Client -> its rank; empty where all have the same."""
        return dict(self.ranks) if len(self.segments) > 1 else {}

    @property
    def segments(self) -> dict[str, tuple[int, int]]:
        """Segment -> the rank above which it lies, and how many components it has."""
        steps = [0, *sorted({rank for _, rank in self.ranks})]
        if len(steps) == 2:
            return {PLAIN: (0, steps[1])}
        return {f"above{low}": (low, high - low) for low, high in pairwise(steps)}


@dataclass(frozen=True)
class Factor:
    """One factor of a segment of an adapter.

    Attributes:
        module: dotted path of the module that the adapter stands beside.
        letter: ``a`` or ``b``.
        above: the rank above which its segment lies.
    """

    module: str
    letter: Factors
    above: int


def factor_of(name: str, config: AdapterConfig) -> Factor | None:
    """The factor that a tensor or module of this name is, or is a part of; None of any other."""
    found = FACTOR.fullmatch(name)
    if found is None:
        return None
    letter: Factors = "a" if found["factor"] == "A" else "b"
    return Factor(found["module"], letter, config.segments[found["segment"]][0])
