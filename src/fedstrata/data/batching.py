"""Which examples make a batch, and how they are padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Index = npt.NDArray[np.int64]
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
    made = [order[i : i + size] for i in range(0, len(order), size)]
    if by_length and rng is not None:
        made = [made[i] for i in rng.permutation(len(made))]
    return made


def pad(sequences: Sequence[npt.NDArray[np.integer[Any]]], value: int, width: int | None = None) -> torch.Tensor:
    """Sequences of token ids as one tensor ``[B, S]`` (int64), filled up on the right with ``value``.

    Args:
        sequences: ids of each example.
        value: the padding id.
        width: ``S``; the longest sequence when absent.
    """
    padded = np.full((len(sequences), width or max(map(len, sequences))), value, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded)
