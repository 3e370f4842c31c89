"""The plot of who holds what: a bar per client, or per group of clients where there are very many."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from fedstrata.errors import plural
from fedstrata.plan.labels import sort_labels
from fedstrata.reports.picture import COLORS, WIDTH, picture, short_name, small

NAMES_SHOWN = 60
BARS_SHOWN = 240
"""Of more clients the bars of a partition stand for several each."""
STAND_FOR = {
    "regress": "quintiles of the values, by their median",
    "tag": "sentences by the type of entity of most of their words; O: without entities",
}
"""Kind of task -> what the labels of a partition are there, as they are not the rows' own."""


def counted(partition: Mapping[str, Any]) -> str:
    """How many test examples there are and, unless only the sites know, how many rows were dropped."""
    test = plural(partition.get("test", 0), "test example")
    if any(client["rows"] is None for client in partition.get("clients", {}).values()):
        return test
    return f"{test}; {plural(partition.get('left_out', 0), 'row')} dropped"


def grouped_words(clients: int) -> str:
    """What the bars of the partition are, where there are too many clients for one each."""
    if clients <= BARS_SHOWN:
        return ""
    each = math.ceil(clients / BARS_SHOWN)
    return f" Clients from the largest to the smallest, a bar for every {each} of {clients:,}: the mean of these."


@picture
def partition_plot(partition: dict[str, Any]) -> Figure | None:
    """A bar per client, in examples, or in rows stacked by label; rare labels are one group.

    Of very many clients a bar is the mean of several, from the largest to the smallest.
    """
    clients: dict[str, Any] = partition.get("clients", {})
    if not clients:
        return None
    if len(clients) > BARS_SHOWN:
        return grouped_bars(clients)
    bars: dict[str, list[float]] = _label_counts(list(clients.values()))
    figure = Figure(figsize=(WIDTH, max(1.8, 0.9 + 0.2 * min(len(clients), NAMES_SHOWN))), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(False, axis="y")
    base = [0.0] * len(clients)
    for color, (label, step) in zip(COLORS, bars.items(), strict=False):
        axes.barh(range(len(clients)), step, 0.8, base, color=color, label=short_name(label))
        base = [below + more for below, more in zip(base, step, strict=True)]
    ticks = range(0, len(clients), math.ceil(len(clients) / NAMES_SHOWN))
    names = [short_name(name) for name in clients]
    axes.set_yticks(ticks, [names[i] for i in ticks])
    axes.set_ylim(len(clients) - 0.4, -0.6)  # the first client at the top
    axes.set_xlabel("examples" if list(bars) == ["examples"] else "rows")
    if len(bars) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def partition_records(partition: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of each client by label, as they are drawn; examples where rows have no label."""
    clients: dict[str, Any] = partition.get("clients", {})
    bars = _label_counts(list(clients.values()))
    return [
        {"client": name, **{label: counts[i] for label, counts in bars.items()}} for i, name in enumerate(clients)
    ]


def grouped_bars(clients: Mapping[str, Any]) -> Figure:
    """The means of groups of clients, from the largest to the smallest, as one stacked shape per label.

    Args:
        clients: name -> its ``rows``, ``examples`` and ``labels``, as in ``partition.json``.
    """
    bars = _label_counts(list(clients.values()))
    each = math.ceil(len(clients) / BARS_SHOWN)
    sizes = [record["examples"] if record["rows"] is None else record["rows"] for record in clients.values()]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    groups = [order[start : start + each] for start in range(0, len(order), each)]
    figure, axes = small()
    axes.grid(False, axis="x")
    edges = [0, *itertools.accumulate(map(len, groups))]
    base = [0.0] * len(groups)
    for color, (label, step) in zip(COLORS, bars.items(), strict=False):
        top = [below + fmean(step[i] for i in group) for below, group in zip(base, groups, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=color, label=short_name(label))
        base = top
    axes.set_xlabel("clients, from the largest to the smallest")
    axes.set_ylabel("examples" if list(bars) == ["examples"] else "rows")
    if len(bars) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _label_counts(clients: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Rows per label and client, the rarest of many labels as one; examples where rows have no label."""
    total = Counter[str]()
    for client in clients:
        for label, count in (client["labels"] or {}).items():
            total[label] += count
    if not total:
        return {"examples": [client["examples"] for client in clients]}
    rare = {label for label, _ in total.most_common()[len(COLORS) - 1 :]} if len(total) > len(COLORS) else set()
    shown = sort_labels(label for label in total if label not in rare)
    counts = {label: [(client["labels"] or {}).get(label, 0) for client in clients] for label in shown}
    if rare:
        counts[f"{len(rare)} rarer labels"] = [
            sum(n for label, n in (client["labels"] or {}).items() if label in rare) for client in clients
        ]
    return counts
