"""The picture of a table: score against bytes on a log axis, each row's way over its rounds, and the front."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import matplotlib
from matplotlib.figure import Figure

from board.protocol import BOUND
from board.table import Entry, Table
from board.tuning import mean_curve

STYLE = {"svg.hashsalt": "fedstrata", "svg.fonttype": "none", "font.size": 9}


def draw(table: Table, path: Path) -> None:
    """Write the picture as SVG, the same bytes for the same figures."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 5))
        axes = figure.add_axes((0.08, 0.1, 0.62, 0.84))
        colors = matplotlib.colormaps["tab20"]
        for number, entry in enumerate(entry for entry in table.whole if entry.bytes):
            _way(axes, entry, colors(number % 20))
        front = table.front()
        if front:
            xs = [entry.bytes / 1e6 for entry in front]
            axes.plot(xs, [entry.mean for entry in front], color="black", linewidth=0.8, linestyle=":", zorder=1)
            axes.set_xscale("log")
        if bound := table.entry(BOUND):
            axes.axhline(bound.mean, color="gray", linewidth=0.8, linestyle="--", label=BOUND)
        axes.set_xlabel("MB per client, up and down, without the initial download")
        axes.set_ylabel(table.metric)
        if table.metric == "loss":
            axes.invert_yaxis()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _way(axes: matplotlib.axes.Axes, entry: Entry, color: tuple[float, ...]) -> None:
    """A row's mean score after each round, with a band of one standard deviation over the seeds."""
    curve = mean_curve(entry.lines)[1:]
    spreads = [stdev(scores) for scores in zip(*(line.scores[1:] for line in entry.lines), strict=True)]
    both = ([up + down for up, down in zip(line.up, line.down, strict=True)][1:] for line in entry.lines)
    spent = [fmean(bytes) / 1e6 for bytes in zip(*both, strict=True)]
    low = [mean - spread for mean, spread in zip(curve, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(curve, spreads, strict=True)]
    axes.fill_between(spent, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(spent, curve, color=color, linewidth=1)
    axes.errorbar(
        [entry.bytes / 1e6], [entry.mean], yerr=[entry.sd], fmt="o", color=color, capsize=3, label=entry.row.name
    )
