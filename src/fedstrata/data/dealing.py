"""What partitions are made of: sizes from shares, rows dealt by sizes, rows grouped by value."""

from __future__ import annotations

import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from fedstrata.plan.kinds import Index
from fedstrata.plan.streams import SERVER

Shares = npt.NDArray[np.float64]


def normal_shares(n: int) -> Shares:
    """Shares of n clients under a normal curve: n equal bins over ±2.5 sigma, the tails in the end bins."""
    edges = np.linspace(-2.5, 2.5, n + 1)[1:-1]
    below = [0.0, *(NormalDist().cdf(edge) for edge in edges), 1.0]
    return np.diff(below)


def whole(shares: Shares, rows: int) -> Index:
    """Whole rows from shares, by largest remainder: the sum of the shares is kept to the nearest row."""
    exact = shares * rows
    sizes = np.floor(exact).astype(np.int64)
    short = min(rows, round(exact.sum())) - sizes.sum()
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes


def deal(order: Index, sizes: Index) -> list[Index]:
    """The first rows of an order to the first client, and so on; what the sizes leave stays undealt."""
    return np.split(order, np.cumsum(sizes))[:-1]


def fill(shards: list[list[int]], least: int, rng: np.random.Generator) -> None:
    """Move random rows, always from the client that is then the largest, until every client has the least."""
    largest = [(-len(shard), i) for i, shard in enumerate(shards)]
    heapq.heapify(largest)
    for shard in shards:
        while len(shard) < least:
            i = largest[0][1]
            giver = shards[i]
            place = rng.integers(len(giver))
            giver[place], giver[-1] = giver[-1], giver[place]
            shard.append(giver.pop())
            heapq.heapreplace(largest, (-len(giver), i))


def named_after(members: Mapping[str, Index]) -> dict[str, Index]:
    """A client per value, named after it as far as file names can be, with its rows, in the order of the names."""
    shards: dict[str, Index] = {}
    taken = {SERVER}
    for value, rows in members.items():
        plain = re.sub(r"[^\w.-]+", "_", value).lstrip(".-")[:50] or "_"
        tries = (plain if n == 1 else f"{plain}-{n}" for n in itertools.count(1))
        name = next(name for name in tries if name.casefold() not in taken)  # as file systems may compare names
        taken.add(name.casefold())
        shards[name] = rows
    return dict(sorted(shards.items()))


def groups(values: Sequence[str]) -> dict[str, Index]:
    """Value -> its places, ascending, the values in order."""
    places = defaultdict(list)
    for i, value in enumerate(values):
        places[value].append(i)
    return {value: np.asarray(places[value]) for value in sorted(places)}
