"""Clipping: the change of a client is shortened to a largest norm, ``[server] max_norm``, before it is merged."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fedstrata.plan.kinds import Tensors

PIECE = 1 << 14
"""Entries that are summed at a time: so few that torch leaves them to one thread, whatever number there is."""


def change_norm(tensors: Tensors, reference: Callable[[str], torch.Tensor]) -> float:
    """The Euclidean norm of a client's change, over all that it sent."""
    squares = 0.0
    for name, tensor in tensors.items():
        flat = (tensor.reshape(-1), reference(name).reshape(-1))
        pairs = zip(*(torch.split(each, PIECE) for each in flat), strict=True)
        squares += math.fsum(float((new.double() - old.double()).square_().sum()) for new, old in pairs)
    return math.sqrt(squares)


def clipped(tensors: Tensors, reference: Callable[[str], torch.Tensor], norm: float, most: float) -> Tensors:
    """The tensors of a client whose change has this norm; the change is shortened to ``most`` if it is longer."""
    if norm <= most:
        return tensors
    factor = most / norm
    return {
        name: (old + factor * (tensor.double() - old)).float()
        for name, tensor in tensors.items()
        for old in (reference(name).double(),)
    }
