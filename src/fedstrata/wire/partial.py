"""Parts of which not everything travels: tensors and rows that stay at the start model's value at both ends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.plan.sharing import Sharing


def travelling(tensors: Mapping[str, torch.Tensor], sharing: Sharing) -> Tensors:
    """Of a part's tensors those that travel, and of a narrowed one the listed rows; no copies of the others."""
    return {
        name: tensor.index_select(0, listed_rows(sharing).to(tensor.device))
        if name in sharing.narrowed
        else tensor
        for name, tensor in tensors.items()
        if name not in sharing.omitted
    }


def filled(tensors: Tensors, held: Tensors | None, sharing: Sharing) -> Tensors:
    """The whole part: what travelled, and of the rest what is held.

    Args:
        tensors: what travelled, decoded.
        held: the part as it is here; it may be None where everything travels.
        sharing: what travels.
    """
    if not (sharing.omitted or sharing.narrowed):
        return tensors
    assert held is not None
    whole = {}
    for name, old in held.items():
        if name in sharing.narrowed:
            rows = listed_rows(sharing).to(old.device)
            whole[name] = old.index_copy(0, rows, tensors[name].to(old.device))
        else:
            whole[name] = old if name in sharing.omitted else tensors[name]
    return whole


def held_back(new: Tensors, old: Mapping[str, torch.Tensor], sharing: Sharing) -> Tensors:
    """A part's new tensors with what never travels as it was, whatever was done to it on the way."""
    if not (sharing.omitted or sharing.narrowed):
        return new
    return filled(travelling(new, sharing), dict(old), sharing)


@lru_cache(4)
def listed_rows(sharing: Sharing) -> torch.Tensor:
    """The listed rows as an index, ``[n]`` int64."""
    return torch.tensor(sharing.listed, dtype=torch.long)


@lru_cache(4)
def unlisted_rows(sharing: Sharing, rows: int) -> torch.Tensor:
    """Of a table of so many rows those that are not listed, ``[n]`` int64."""
    listed = torch.ones(rows, dtype=torch.bool)
    listed[listed_rows(sharing)] = False
    return listed.nonzero()[:, 0]
