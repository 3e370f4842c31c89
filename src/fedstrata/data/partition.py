"""Who holds which rows: the splits of a data set among clients."""

from __future__ import annotations

import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.label_tables import TABLES
from fedstrata.job.tables import Clients
from fedstrata.plan.labels import sort_labels
from fedstrata.plan.streams import SERVER

Index = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

COUNT = 6
"""Clients, where the job names no number."""


def partition(
    clients: Clients,
    rows: int,
    labels: Sequence[str] | None,
    values: Sequence[str] | None,
    rng: np.random.Generator,
    classes: Sequence[str] = (),
) -> dict[str, Index]:
    """Deal rows to clients: client -> its rows, ascending; no row twice.

    The clients stand in the order of their names, which is the order they have everywhere. With ``min_examples``
    0 a client may come out empty.

    Args:
        clients: kind of partition and its options.
        rows: number of rows.
        labels: label of every row, for ``dirichlet`` (without labels the sizes vary),
            ``label_sorted`` and ``label_table``.
        values: value of every row in the column that names the client, for ``column``.
        rng: the only source of chance.
        classes: the labels in their order, for ``label_sorted`` and ``label_table``; by default as
            :func:`sort_labels` has them.

    Raises:
        UserError: there are too few rows, or sizes or values do not go with the other settings.
    """
    if clients.partition == "column":
        if values is None:
            raise ValueError("partition 'column' needs the values of the column")
        shards = _by_value(clients, values)
    else:
        count = clients.count or number_of_clients(clients)
        names = [f"client-{i:0{len(str(count - 1))}}" for i in range(count)]
        if clients.partition == "dirichlet":
            dealt = _dirichlet(clients, count, rows, labels, rng)
        elif clients.partition in ("label_sorted", "label_table"):
            if labels is None:
                raise UserError(f"[clients] partition: {clients.partition!r} needs a label for every row")
            order = list(classes) or sort_labels(set(labels))
            if clients.partition == "label_sorted":
                dealt = _sorted(count, labels, order, rng)
            else:
                dealt = _table(clients, labels, order, rng)
        else:
            dealt = _deal(rng.permutation(rows), _sizes(clients, count, rows))
        shards = dict(zip(names, dealt, strict=True))
    for name, shard in shards.items():
        if len(shard) < clients.min_examples:
            raise UserError(
                f"[clients] min_examples: is {clients.min_examples}, but {name} gets {len(shard)} of {rows} rows"
            )
    return {name: np.sort(shard) for name, shard in shards.items()}


def normal_shares(n: int) -> Shares:
    """Shares of n clients under a normal curve: n equal bins over ±2.5 sigma, the tails in the end bins."""
    edges = np.linspace(-2.5, 2.5, n + 1)[1:-1]
    below = [0.0, *(NormalDist().cdf(edge) for edge in edges), 1.0]
    return np.diff(below)


def _whole(shares: Shares, rows: int) -> Index:
    """Whole rows from shares, by largest remainder: the sum of the shares is kept to the nearest row."""
    exact = shares * rows
    sizes = np.floor(exact).astype(np.int64)
    short = min(rows, round(exact.sum())) - sizes.sum()
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes


def _deal(order: Index, sizes: Index) -> list[Index]:
    """The first rows of an order to the first client, and so on; what the sizes leave stays undealt."""
    return np.split(order, np.cumsum(sizes))[:-1]


def _sizes(clients: Clients, count: int, rows: int) -> Index:
    """Rows per client of a split that looks at nothing but their number."""
    sizes = clients.sizes
    if sizes is None:
        return _whole(
            normal_shares(count) if clients.partition == "quantity_skew" else np.full(count, 1 / count), rows
        )
    if all(0 < size <= 1 for size in sizes) and 0 < sum(sizes) <= 1 + 1e-9:
        return _whole(np.asarray(sizes), rows)
    if not sizes or not all(size >= 0 and float(size).is_integer() for size in sizes):
        raise UserError(
            f"[clients] sizes: found {sizes}; legal: numbers of rows, or shares above 0 that add up to at most 1"
        )
    if sum(sizes) > rows:
        raise UserError(f"[clients] sizes: add up to {sum(sizes):.0f} rows, but there are {rows}")
    return np.asarray(sizes, dtype=np.int64)


def _dirichlet(
    clients: Clients, count: int, rows: int, labels: Sequence[str] | None, rng: np.random.Generator
) -> list[Index]:
    """Each label's rows dealt by shares drawn for it; then rows moved until no client is below the least."""
    if rows < count * clients.min_examples:
        raise UserError(
            f"[clients] min_examples: is {clients.min_examples}, but {rows} rows are too few for {count} clients"
        )
    # Beyond these bounds every share is 0, 1 or 1 / count to the last digit, and the draw would overflow.
    alpha = np.full(count, np.clip(clients.alpha, 1e-9, 1e9))
    shards: list[list[int]] = [[] for _ in range(count)]
    for members in _groups([""] * rows if labels is None else labels).values():
        sizes = _whole(rng.dirichlet(alpha), len(members))
        for shard, more in zip(shards, _deal(rng.permutation(members), sizes), strict=True):
            shard.extend(more.tolist())
    _fill(shards, clients.min_examples, rng)
    return [np.asarray(shard, dtype=np.int64) for shard in shards]


def number_of_clients(clients: Clients) -> int:
    """How many clients a split makes whose job names no number."""
    if clients.table is not None:
        return len(TABLES[clients.table] if isinstance(clients.table, str) else clients.table)
    return COUNT if clients.sizes is None else len(clients.sizes)


def _sorted(count: int, labels: Sequence[str], classes: Sequence[str], rng: np.random.Generator) -> list[Index]:
    """The rows in the order of their labels, equal ones shuffled, cut into parts of equal size."""
    place = {label: i for i, label in enumerate(classes)}
    shuffled = rng.permutation(len(labels))
    ranks = np.asarray([place[label] for label in labels])
    order = shuffled[np.argsort(ranks[shuffled], kind="stable")]
    return _deal(order, _whole(np.full(count, 1 / count), len(labels)))


def _table(
    clients: Clients, labels: Sequence[str], classes: Sequence[str], rng: np.random.Generator
) -> list[Index]:
    """Shards of one size, the largest with which every client gets its mix; the rows beyond that stay undealt."""
    groups = _groups(labels)
    shares = _shares(clients, classes)
    there = np.asarray([len(groups.get(label, ())) for label in classes])
    wanted = shares.sum(axis=0)
    size = int(min(there[wanted > 0] / wanted[wanted > 0]))
    while size and (np.sum([_whole(share, size) for share in shares], axis=0) > there).any():
        size -= 1  # rounding to whole rows asked for one too many
    if not size:
        raise UserError("[clients] table: there are too few rows of a label to give every client its share")
    sizes = np.asarray([_whole(share, size) for share in shares])
    dealt = [_deal(rng.permutation(groups.get(label, ())), sizes[:, i]) for i, label in enumerate(classes)]
    return [np.concatenate(own) for own in zip(*dealt, strict=True)]


def _shares(clients: Clients, classes: Sequence[str]) -> Shares:
    """Shares of each class at each client, ``[clients, classes]``, adding up to 1."""
    table = clients.table
    if isinstance(table, str):
        rows = [list(row) for row in TABLES[table]]
        if len(rows[0]) != len(classes):
            raise UserError(
                f"[clients] table: {table!r} is for {len(rows[0])} labels, the rows have {len(classes)} "
                f"({', '.join(classes[:5])})"
            )
    else:
        for row in table or ():
            for label in row:
                if label not in classes:
                    raise UserError(f"[clients] table: no label {label!r}; {did_you_mean(label, classes)}")
        rows = [[row.get(label, 0.0) for label in classes] for row in table or ()]
    made = np.asarray(rows, dtype=np.float64)
    sums = made.sum(axis=1)
    if not (np.isclose(sums, 100).all() or np.isclose(sums, 1).all()):
        raise UserError(
            f"[clients] table: the shares of a client must add up to 100 or to 1, found {sums.round(3).tolist()}"
        )
    shares: Shares = made / sums[:, None]
    return shares


def _fill(shards: list[list[int]], least: int, rng: np.random.Generator) -> None:
    """Move random rows, each from the client that is then the largest, until every client has the least."""
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


def _by_value(clients: Clients, values: Sequence[str]) -> dict[str, Index]:
    """One client per value, named after it as far as a file name can be, in the order of the names."""
    groups = _groups(values)
    if clients.count not in (None, len(groups)):
        raise UserError(
            f"[clients] count: is {clients.count}, but {clients.column!r} has {len(groups)} different values"
        )
    shards: dict[str, Index] = {}
    taken = {SERVER}
    for value, members in groups.items():
        plain = re.sub(r"[^\w.-]+", "_", value).lstrip(".-")[:50] or "_"
        tries = (plain if n == 1 else f"{plain}-{n}" for n in itertools.count(1))
        name = next(name for name in tries if name.casefold() not in taken)  # as file systems may compare names
        taken.add(name.casefold())
        shards[name] = members
    return dict(sorted(shards.items()))


def _groups(values: Sequence[str]) -> dict[str, Index]:
    """Value -> its places, ascending, the values in order."""
    places = defaultdict(list)
    for i, value in enumerate(values):
        places[value].append(i)
    return {value: np.asarray(places[value]) for value in sorted(places)}
