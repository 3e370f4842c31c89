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
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    if by_length:
        pool = len(order) if rng is None else POOL * size
        pools = [order[i : i + pool] for i in range(0, len(order), max(pool, 1))]
        order = np.concatenate([chunk[np.argsort(lengths[chunk], kind="stable")] for chunk in pools] or [order])
    cut = [order[i : i + size] for i in range(0, len(order), size)]
    if by_length and rng is not None:
        cut = [cut[i] for i in rng.permutation(len(cut))]
    return cut
