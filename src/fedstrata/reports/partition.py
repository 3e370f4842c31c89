"""Which client has which rows: a partition as a table and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedstrata.plan.kinds import Index
from fedstrata.plan.labels import sort_labels
from fedstrata.reports.partition_plot import BARS_SHOWN, grouped_bars
from fedstrata.wire.foreign import visible

WIDTH = 80
"""Columns of a terminal that the table keeps to."""
BAR = 8
"""Characters of the bar of the largest client."""
IN_TABLE, IN_PICTURE = 8, 30
"""Most labels shown; if there are more, the last one is all the rarer ones together."""
COLORS = [colormaps[name](i) for name in ("tab20", "tab20b") for i in range(20)]


def partition_table(shards: Mapping[str, Index], labels: Sequence[str] | None) -> Table:
    """Rows, share and label counts of every client, and of all; for a terminal of 80 columns or more.

    Args:
        shards: client -> indices of its rows.
        labels: label of every row, if it has one.
    """
    sizes = [len(rows) for rows in shards.values()]
    client = min(20, max(map(cell_len, ("client", *shards))))
    digits = max(len("rows"), len(str(sum(sizes))))
    cell = max(digits, min(7, max(map(cell_len, set(labels or ())), default=0)))
    fitting = (WIDTH - client - digits - len("100.0") - BAR - 3) // (cell + 1)
    heads, counts = label_counts(shards, labels, min(IN_TABLE, fitting))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, show_footer=True)
    table.add_column("client", "all", width=client, overflow="fold")
    table.add_column("rows", str(sum(sizes)), justify="right", no_wrap=True)
    table.add_column("%", "100.0", justify="right", no_wrap=True)
    table.add_column(width=BAR)
    for head, total in zip(heads, counts.sum(axis=0), strict=True):
        table.add_column(Text(_cut(head, 3 * cell)), str(total), width=cell, justify="right", overflow="fold")
    for name, size, row in zip(shards, sizes, counts, strict=True):
        share = size / max(1, sum(sizes))
        table.add_row(name, str(size), f"{100 * share:.1f}", _bar(size / max(1, *sizes)), *map(str, row))
    return table


def partition_picture(shards: Mapping[str, Index], labels: Sequence[str] | None) -> Figure:
    """A bar of rows per client, from the top in the clients' order, stacked by label.

    Of very many clients a bar is the mean of several, as on a page: one for each takes minutes and gigabytes.

    Args:
        shards: client -> indices of its rows.
        labels: label of every row, if it has one.
    """
    shards = {visible(name): rows for name, rows in shards.items()}  # an SVG holds them as they are
    labels = labels and [visible(label) for label in labels]
    if len(shards) > BARS_SHOWN:
        return _grouped(shards, labels)
    heads, counts = label_counts(shards, labels, IN_PICTURE)
    if labels is None:
        counts = np.asarray([[len(rows)] for rows in shards.values()])
    figure = Figure(figsize=(9, 1.2 + max(0.24 * len(shards), 0.21 * len(heads))), layout="constrained")
    axes = figure.subplots()
    starts = np.cumsum(counts, axis=1) - counts
    for widths, left, color in zip(counts.T, starts.T, COLORS, strict=False):
        axes.barh(list(shards), widths, left=left, height=0.8, color=color)
    axes.invert_yaxis()
    axes.set_xlabel("rows")
    axes.spines[["top", "right"]].set_visible(False)
    if heads:
        keys = [Patch(color=color) for _, color in zip(heads, COLORS, strict=False)]
        legend = figure.legend(keys, [_cut(head, 40) for head in heads], loc="outside right upper", frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _grouped(shards: Mapping[str, Index], labels: Sequence[str] | None) -> Figure:
    figure = grouped_bars(
        {
            name: {"rows": len(rows), "labels": Counter(labels[i] if labels else "rows" for i in rows)}
            for name, rows in shards.items()
        }
    )
    for text in (text for legend in figure.legends for text in legend.get_texts()):
        text.set_parse_math(False)
    return figure


def label_counts(
    shards: Mapping[str, Index], labels: Sequence[str] | None, most: int
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Labels in order, and how often each client has them: clients x labels.

    Of more than ``most`` labels the rarest are one, called "other". Without labels there are no columns.
    """
    counters = [Counter(() if labels is None else (labels[i] for i in rows)) for rows in shards.values()]
    total = sum(counters, Counter[str]())
    by_count = sorted(total, key=lambda label: (-total[label], label))
    heads = sort_labels(by_count if len(by_count) <= most else by_count[: most - 1])
    counts = [[client[label] for label in heads] for client in counters]
    if len(heads) < len(total):
        counts = [[*row, client.total() - sum(row)] for row, client in zip(counts, counters, strict=True)]
        heads.append("other")
    return heads, np.asarray(counts, dtype=np.int64).reshape(len(counters), len(heads))


def _cut(label: str, most: int) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _bar(part: float) -> str:
    """A bar of at most ``BAR`` characters, to the eighth of one."""
    eighths = round(8 * BAR * part)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
