"""Which examples make a batch."""

from __future__ import annotations

import numpy as np

from fedstrata.plan.kinds import Index

POOL = 50
"""Batches drawn together and then sorted by length: large enough to pad little, small enough to stay random."""


def batches(lengths: Index, size: int, rng: np.random.Generator | None, by_length: bool = True) -> list[Index]:
    """Divide examples into batches.

    Args:
        lengths: tokens of each example, ``[n]``.
        size: examples per batch; the last one may be smaller.
        rng: shuffles examples and batches; None keeps their order (or the order of their length).
        by_length: put examples of like length together, within random pools of ``POOL`` batches.

    Returns:
        Positions into ``lengths``, one array per batch; together every position once.
    """
    cut = [pool[i : i + size] for pool in _pools(lengths, size, rng, by_length) for i in range(0, len(pool), size)]
    return _shuffled(cut, rng) if by_length else cut


def token_batches(
    widths: Index, budget: int, rng: np.random.Generator | None, by_length: bool = True
) -> list[Index]:
    """Divide examples into batches of at most ``budget`` positions, padding included.

    A batch takes examples, in the order of :func:`batches`, until one more would make it larger; one that is
    longer than the budget by itself is a batch alone. How many batches there are may depend on the order.

    Args:
        widths: positions that each example needs, ``[n]``; a batch is padded to the most of its examples.
        budget: most positions of a batch.
        rng: as for :func:`batches`.
        by_length: as for :func:`batches`, within pools that hold about ``POOL`` batches.

    Returns:
        Positions into ``widths``, one array per batch; together every position once.
    """
    mean = max(1, budget * len(widths) // max(1, int(widths.sum())))
    cut = [batch for pool in _pools(widths, mean, rng, by_length) for batch in _filled(pool, widths, budget)]
    return _shuffled(cut, rng) if by_length else cut


def _pools(lengths: Index, size: int, rng: np.random.Generator | None, by_length: bool) -> list[Index]:
    """All examples in their order: one pool, or random ones of ``POOL`` batches, each sorted by length."""
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    if not by_length:
        return [order]
    pool = len(order) if rng is None else POOL * size
    pools = [order[i : i + pool] for i in range(0, len(order), max(pool, 1))]
    return [chunk[np.argsort(lengths[chunk], kind="stable")] for chunk in pools]


def _filled(order: Index, widths: Index, budget: int) -> list[Index]:
    """Examples in a given order, cut where one more would exceed the budget."""
    cuts, start, widest = [], 0, 0
    for place, width in enumerate(widths[order].tolist()):
        widest = max(widest, width)
        if place > start and (place + 1 - start) * widest > budget:
            cuts.append(order[start:place])
            start, widest = place, width
    return [*cuts, order[start:]] if len(order) else []


def _shuffled(cut: list[Index], rng: np.random.Generator | None) -> list[Index]:
    return cut if rng is None else [cut[i] for i in rng.permutation(len(cut))]
