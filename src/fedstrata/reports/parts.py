"""The parts of a model, as a run's records describe them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STACKED = ("layer", "base", "adapter")
"""Kinds whose parts belong to a layer."""


@dataclass(frozen=True)
class PartRecord:
    """What ``parts.json`` says of one part.

    Attributes:
        name: what the other records call it.
        kind: what it is, as :class:`fedstrata.plan.parts.Part` has it.
        depth: index of its layer, from the bottom; None where it belongs to no layer.
    """

    name: str
    kind: str
    depth: int | None


def read_parts(records: Iterable[Mapping[str, Any]]) -> dict[str, PartRecord]:
    """Name -> part, in the model's order, from the records of :meth:`fedstrata.plan.parts.Parts.records`."""
    parts = (PartRecord(record["name"], record["kind"], record["depth"]) for record in records)
    return {part.name: part for part in parts}


def part_words(names: Sequence[str], parts: Mapping[str, PartRecord]) -> str:
    """Parts for a reader, layers drawn together: ``embeddings, layers 0–3, head``."""
    known = [parts[name] for name in names if name in parts]
    stacked = {part.name for part in known if part.kind in STACKED and part.depth is not None}
    lower = [part.name for part in known if part.kind == "embeddings"]
    stacks = [
        _ranges(kind, [part.depth for part in known if part.kind == kind and part.depth is not None])
        for kind in STACKED
    ]
    upper = [name for name in names if name not in stacked and name not in lower]
    return ", ".join([*lower, *filter(None, stacks), *upper])


def _ranges(kind: str, depths: Sequence[int]) -> str:
    """``layers 0–2, 5`` of the layers at these depths; empty where there are none."""
    spans: list[tuple[int, int]] = []
    depths = sorted(set(depths))
    for depth in depths:
        if spans and depth == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], depth
        else:
            spans.append((depth, depth))
    ranges = [f"{first}–{last}" if last > first else str(first) for first, last in spans]
    return f"{kind}{'' if len(depths) == 1 else 's'} {', '.join(ranges)}" if ranges else ""
