"""What of the model's parts clients do not send, and in which rounds they send the rest. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_POSITIONS = r"(position\w*|wpe)"
"""In the name of the table with a row for each position: ``position_embeddings``, OPT's ``embed_positions``, …"""
POSITIONS = re.compile(rf"{_POSITIONS}(\.\w+)?\.weight$")
"""Ends of that name."""
DISTANCES = re.compile(r"(rel_embeddings|relative_attention_bias)\.weight$")
"""Ends of the name of a table with a row for each distance, of which the largest that is used tells the length."""
POSITION_FACTORS = re.compile(rf"{_POSITIONS}\.lora_embedding_A\.\w+$")
"""Ends of the names of an adapter's tensors with a column for each position."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sharing:
    """What of the parts that a method sends stays where it is, and how often the rest is sent.

    Attributes:
        omitted: tensors that never travel: clients do not train them, the server's stay at the start model's.
        narrowed: tensors with a row for each token, of which only the listed rows are trained and travel.
        listed: those rows, ascending.
        period: rounds in which every part is sent once.
    """

    omitted: frozenset[str] = frozenset()
    narrowed: frozenset[str] = frozenset()
    listed: tuple[int, ...] = ()
    period: int = 1

    def travelling(self, shapes: Shapes) -> Shapes:
        """Of tensors of these shapes those that travel, as they do."""
        if not (self.omitted or self.narrowed):
            return shapes
        return {
            name: (len(self.listed), *shape[1:]) if name in self.narrowed else shape
            for name, shape in shapes.items()
            if name not in self.omitted
        }

    def elements(self, shapes: Shapes) -> int:
        """Number of elements that travel of tensors of these shapes."""
        return sum(map(math.prod, self.travelling(shapes).values()))

    def leaves_out(self, shapes: Shapes) -> bool:
        """Whether nothing of a part with these tensors travels."""
        return self.omitted >= shapes.keys()


EVERYTHING = Sharing()
"""Everything that a method sends travels, in every round."""


def turns(sizes: Mapping[str, int], period: int) -> Mapping[str, int]:
    """Part -> the round, modulo ``period``, in which it is sent: one by one, each where least is sent yet.

    Args:
        sizes: part -> its elements; with the largest first the rounds come out even.
        period: rounds in which every part is sent once.
    """
    sent = [0] * period
    turn = {}
    for part, size in sizes.items():
        turn[part] = min(range(period), key=lambda i: (sent[i], i))
        sent[turn[part]] += size
    return turn


def last_sent(turn: int, period: int, round: int) -> int:
    """The last round before ``round`` in which a part was due; -1 if it never was."""
    return max(-1, round - 1 - (round - 1 - turn) % period)


def due(turn: int, period: int, round: int, rounds: int) -> bool:
    """Whether a part is sent in ``round``; in the last one all are, so that nothing that was trained is lost."""
    return round % period == turn or round == rounds - 1


def without(names: Iterable[str], gone: Collection[str]) -> tuple[str, ...]:
    """The names that are not among ``gone``."""
    return tuple(name for name in names if name not in gone)
