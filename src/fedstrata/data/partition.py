"""Partitions: which client holds which rows of a data set.

A new partition is one function here and its line in :data:`PARTITIONS`. Its name is then a value of
``[clients] partition``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.data.dealing import Shares, deal, fill, groups, named_after, normal_shares, whole
from fedstrata.errors import UserError, did_you_mean, plural
from fedstrata.job.data_tables import Clients
from fedstrata.job.label_tables import TABLES
from fedstrata.plan.kinds import Index
from fedstrata.plan.labels import sort_labels

COUNT = 6
"""Clients, where the job names no number."""


@dataclass(frozen=True)
class PartitionInput:
    """What a partition may look at.

    Attributes:
        clients: the job's ``[clients]``.
        rows: number of rows.
        rng: the only source of chance.
        labels: label of every row; None where rows have none.
        classes: the labels in their order; empty for the order of :func:`sort_labels`.
        values: value of every row in the column ``clients.column``.
        sources: name of every row's source, where ``data.train`` names its sources.
        source_names: the names of all sources, also of those without rows.
    """

    clients: Clients
    rows: int
    rng: np.random.Generator
    labels: Sequence[str] | None = None
    classes: Sequence[str] = ()
    values: Sequence[str] | None = None
    sources: Sequence[str] = ()
    source_names: Sequence[str] = ()


def partition(data: PartitionInput) -> dict[str, Index]:
    """Deal rows to clients: client -> its rows, ascending; no row twice.

    The clients stand in the order of their names, which is the order they have everywhere. With ``min_examples``
    0 a client may come out empty.

    Raises:
        UserError: there is no such partition, there are too few rows, or the rows do not have what it needs.
    """
    least = data.clients.min_examples
    check_partition(data.clients)
    shards = PARTITIONS[data.clients.partition](data)
    for name, shard in shards.items():
        if len(shard) < least:
            raise UserError(
                f"[clients] min_examples: is {least}, but {name} gets {len(shard)} of {plural(data.rows, 'row')}"
            )
    return {name: np.sort(shard) for name, shard in shards.items()}


def check_partition(clients: Clients) -> None:
    """Refuse a job whose partition does not exist.

    Raises:
        UserError: it does not.
    """
    if (found := clients.partition) not in PARTITIONS:
        raise UserError(f"[clients] partition: {found!r} is invalid; {did_you_mean(found, PARTITIONS)}")


def client_names(clients: Clients, source_names: Sequence[str] = ()) -> list[str]:
    """The clients of a job, where its rows cannot be read.

    Args:
        clients: the job's ``[clients]``.
        source_names: the names of the sources of ``data.train``.
    """
    if clients.partition == "files" and source_names:
        return list(named_after({name: np.empty(0, np.int64) for name in sorted(source_names)}))
    count = clients.count or _default_count(clients)
    return [f"client-{i:0{len(str(count - 1))}}" for i in range(count)]


def _default_count(clients: Clients) -> int:
    """Number of clients of a partition whose job names no number."""
    if clients.table is not None:
        return len(TABLES[clients.table] if isinstance(clients.table, str) else clients.table)
    return COUNT if clients.sizes is None else len(clients.sizes)


def _numbered(data: PartitionInput, shards: Sequence[Index]) -> dict[str, Index]:
    return dict(zip(client_names(data.clients), shards, strict=True))


def _count(data: PartitionInput) -> int:
    return data.clients.count or _default_count(data.clients)


def iid(data: PartitionInput) -> dict[str, Index]:
    """Random rows, as many for every client."""
    count = _count(data)
    return _random(data, whole(np.full(count, 1 / count), data.rows))


def quantity_skew(data: PartitionInput) -> dict[str, Index]:
    """Random rows, as many as a normal curve gives: see :func:`normal_shares`."""
    return _random(data, whole(normal_shares(_count(data)), data.rows))


def by_sizes(data: PartitionInput) -> dict[str, Index]:
    """Random rows, as many as ``clients.sizes`` says: numbers of rows or shares of all."""
    sizes = data.clients.sizes
    assert sizes is not None
    if all(0 < size <= 1 for size in sizes) and 0 < sum(sizes) <= 1 + 1e-9:
        return _random(data, whole(np.asarray(sizes), data.rows))
    if not sizes or not all(size >= 0 and float(size).is_integer() for size in sizes):
        raise UserError(
            f"[clients] sizes: found {sizes}; expected numbers of rows, or shares above 0 that add up to at most 1"
        )
    if sum(sizes) > data.rows:
        raise UserError(f"[clients] sizes: add up to {sum(sizes):.0f} rows, but there are {data.rows}")
    return _random(data, np.asarray(sizes, dtype=np.int64))


def _random(data: PartitionInput, sizes: Index) -> dict[str, Index]:
    return _numbered(data, deal(data.rng.permutation(data.rows), sizes))


def dirichlet(data: PartitionInput) -> dict[str, Index]:
    """Each label's rows dealt by shares drawn for it; then rows moved until no client is below the least.

    Rows without labels count as of one label: the sizes vary.
    """
    count, rows, rng, least = _count(data), data.rows, data.rng, data.clients.min_examples
    if rows < count * least:
        few = f"{plural(rows, 'row')} {'is' if rows == 1 else 'are'} too few for {plural(count, 'client')}"
        raise UserError(f"[clients] min_examples: is {least}, but {few}")
    # Beyond these bounds every share is 0, 1 or 1 / count to the last digit, and the draw would overflow.
    alpha = np.full(count, np.clip(data.clients.alpha, 1e-9, 1e9))
    shards: list[list[int]] = [[] for _ in range(count)]
    for members in groups([""] * rows if data.labels is None else data.labels).values():
        sizes = whole(rng.dirichlet(alpha), len(members))
        for shard, more in zip(shards, deal(rng.permutation(members), sizes), strict=True):
            shard.extend(more.tolist())
    fill(shards, least, rng)
    return _numbered(data, [np.asarray(shard, dtype=np.int64) for shard in shards])


def dirichlet_mix(data: PartitionInput) -> dict[str, Index]:
    """Shards of equal size, each with a mix of labels drawn for its client around that of all rows.

    The law of FedNLP (Lin et al., 2022), after Hsu et al. (2019): the mix is drawn from Dir(alpha p), p being the
    shares of the labels in all rows. Clients are filled one after the other; where a label has run out, rows of
    the others take its place, in proportion to what is left of each.
    """
    labels, _ = _labels(data)
    left = [data.rng.permutation(members) for members in groups(labels).values()]
    concentration = np.clip(data.clients.alpha * np.asarray([len(rows) for rows in left]) / len(labels), 1e-9, 1e9)
    shards = []
    for size in whole(np.full(_count(data), 1 / _count(data)), len(labels)):
        there = np.asarray([len(rows) for rows in left])
        sizes = np.minimum(whole(data.rng.dirichlet(concentration), int(size)), there)
        there -= sizes
        sizes += whole(there / max(1, there.sum()), int(size - sizes.sum()))
        shards.append(np.concatenate([rows[:n] for rows, n in zip(left, sizes, strict=True)]))
        left = [rows[n:] for rows, n in zip(left, sizes, strict=True)]
    return _numbered(data, shards)


def _labels(data: PartitionInput) -> tuple[Sequence[str], Sequence[str]]:
    """The label of every row, and the classes in their order."""
    if data.labels is None:
        raise UserError(f"[clients] partition: {data.clients.partition!r} needs a label for every row")
    return data.labels, list(data.classes) or sort_labels(set(data.labels))


def label_sorted(data: PartitionInput) -> dict[str, Index]:
    """The rows in the order of their labels, equal ones shuffled, cut into shards of equal size."""
    labels, classes = _labels(data)
    count = _count(data)
    place = {label: i for i, label in enumerate(classes)}
    shuffled = data.rng.permutation(len(labels))
    ranks = np.asarray([place[label] for label in labels])
    order = shuffled[np.argsort(ranks[shuffled], kind="stable")]
    return _numbered(data, deal(order, whole(np.full(count, 1 / count), len(labels))))


def label_table(data: PartitionInput) -> dict[str, Index]:
    """Shards of one size, the largest with which every client gets its mix; the rows beyond that stay undealt."""
    labels, classes = _labels(data)
    members = groups(labels)
    shares = _shares(data.clients, classes)
    available = np.asarray([len(members.get(label, ())) for label in classes])
    wanted = shares.sum(axis=0)
    size = int(min(available[wanted > 0] / wanted[wanted > 0]))
    while size and (np.sum([whole(share, size) for share in shares], axis=0) > available).any():
        size -= 1  # rounding to whole rows took one too many
    if not size:
        raise UserError("[clients] table: there are too few rows of a label to give every client its share")
    sizes = np.asarray([whole(share, size) for share in shares])
    dealt = [deal(data.rng.permutation(members.get(label, ())), sizes[:, i]) for i, label in enumerate(classes)]
    return _numbered(data, [np.concatenate(own) for own in zip(*dealt, strict=True)])


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
    numbers = np.asarray(rows, dtype=np.float64)
    sums = numbers.sum(axis=1)
    if not (np.isclose(sums, 100).all() or np.isclose(sums, 1).all()):
        raise UserError(
            f"[clients] table: the shares of a client must add up to 100 or to 1, found {sums.round(3).tolist()}"
        )
    shares: Shares = numbers / sums[:, None]
    return shares


def by_column(data: PartitionInput) -> dict[str, Index]:
    """One client per value of ``clients.column``."""
    if data.values is None:
        raise ValueError("partition 'column' needs the values of the column")
    members = groups(data.values)
    if data.clients.count not in (None, len(members)):
        raise UserError(
            f"[clients] count: is {data.clients.count}, but {data.clients.column!r} has {len(members)} "
            "different values"
        )
    return named_after(members)


def by_file(data: PartitionInput) -> dict[str, Index]:
    """One client per named source of ``data.train``."""
    if not data.source_names:
        raise UserError(
            "[clients] partition: 'files' needs named sources, one for each client: "
            "[data] train = {north = 'north.csv', south = 'south.csv'}"
        )
    if data.clients.count not in (None, len(data.source_names)):
        raise UserError(
            f"[clients] count: is {data.clients.count}, but [data] train names {len(data.source_names)} sources, "
            "each of them a client; partition = 'iid' deals the rows of all of them together"
        )
    members = groups(data.sources)
    return named_after({name: members.get(name, np.empty(0, np.int64)) for name in sorted(data.source_names)})


PARTITIONS: dict[str, Callable[[PartitionInput], dict[str, Index]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet_mix": dirichlet_mix,
    "sizes": by_sizes,
    "quantity_skew": quantity_skew,
    "label_sorted": label_sorted,
    "label_table": label_table,
    "column": by_column,
    "files": by_file,
}
"""Value of ``[clients] partition`` -> what deals the rows."""
