"""The pages of a sweep: its table with pictures, and a page of each finished cell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple
from urllib.parse import quote

from matplotlib.figure import Figure

from fedstrata.plan.kinds import LOWER_IS_BETTER, PAGE
from fedstrata.reports import plots
from fedstrata.reports.html_table import Head, HtmlTable
from fedstrata.reports.page import render, shown, write_page
from fedstrata.reports.picture import (
    COLORS,
    HEIGHT,
    WIDTH,
    PlainNumbers,
    Shown,
    picture,
    short_name,
    whole_numbers,
)
from fedstrata.reports.runs import curve, upto
from fedstrata.reports.sweep import SweepRow, finished
from fedstrata.reports.sweep_files import SweepTable, read_table
from fedstrata.reports.sweep_text import by_stage, column_heads, note, table_cells, verdicts
from fedstrata.wire.foreign import visible

MOST_CURVES = 500
"""Cells of a sweep whose rounds are drawn; of more the curves are left out."""


def write_sweep_page(folder: Path, path: Path) -> Path:
    """Write the page of a sweep to ``path``, and each finished cell's into the cell's folder; return ``path``.

    A cell's page is written once: it is kept while it is no older than the cell's result.

    Raises:
        UserError: the folder holds no sweep's table.
        OSError: a page cannot be written.
    """
    table = read_table(folder)
    links = []
    for cell, place in table.cells.items():
        if _up_to_date(place) or _write_cell(place):
            links.append((cell, Path(os.path.relpath(place / PAGE, path.parent)).as_posix()))
    failed = {f"{row.row}, seed {seed}": why for row in table.rows for seed, why in row.failed.items()}
    return render(
        path,
        "sweep.html.j2",
        name=visible(folder.resolve().name),
        note=note(table.rows, table.against),
        stages=[_stage(stage, rows, table) for stage, rows in by_stage(table.rows)],
        failed=list(failed.items()),
        cells=_cells(links),
    )


def _up_to_date(folder: Path) -> bool:
    page, result = folder / PAGE, folder / "result.json"
    return page.exists() and result.exists() and page.stat().st_mtime_ns >= result.stat().st_mtime_ns


def _write_cell(folder: Path) -> bool:
    """Write a cell's page; False while the cell is not finished."""
    run = finished(folder)
    if run is not None:
        write_page([run], folder / PAGE)
    return run is not None


def _cells(links: Sequence[tuple[str, str]]) -> HtmlTable:
    """The cells, each with a link to its page."""
    heads = (Head("cell", words=True), Head("report", words=True))
    return HtmlTable(
        "Cells",
        heads,
        [[cell, visible(page)] for cell, page in links],
        [quote(os.fsencode(page)) for _, page in links],
    )


def _stage(stage: str, rows: Sequence[SweepRow], table: SweepTable) -> dict[str, Any]:
    costs = "Mean score over the seeds; the bars are one standard deviation up and down."
    front = " The line joins the rows that no other beats in both score and cost."
    shown_pictures = []
    for metric in dict.fromkeys(row.metric for row in rows if row.mean is not None):
        points = _points(metric, rows)
        records = [point._asdict() for point in points]
        for cost, what in (("mb", "MB up"), ("tflops", "TFLOP")):
            title = f"{metric} against {what} {stage}".strip()
            shown_pictures.append(Shown(title, sweep_plot(metric, points, cost), costs + front, records))
        curves = _curves(metric, stage, rows, table)
        said = "Mean score over the seeds after each round; the bands are one standard deviation up and down."
        records = [
            {"row": name, "round": at, "mean": mean, "sd": sd}
            for name, line in curves.items()
            for at, mean, sd in line
        ]
        shown_pictures.append(
            Shown(f"{metric} by round {stage}".strip(), curves_plot(metric, curves), said, records)
        )
    heads = [
        Head("row", words=True),
        Head("method", words=True),
        Head("seeds"),
        *map(Head, column_heads(rows)[1:]),
    ]
    lines = [
        [row.row, row.method, str(len(row.seeds)), *cells[1:]]
        for row, cells in zip(rows, table_cells(rows), strict=True)
    ]
    return {
        "name": stage,
        "table": HtmlTable(f"Rows {stage}".strip(), heads, lines),
        "verdicts": verdicts(rows),
        "pictures": shown(shown_pictures),
    }


class SweepPoint(NamedTuple):
    """Of a row its name, mean score, standard deviation, MB up per client, and TFLOP of all clients."""

    row: str
    mean: float
    sd: float
    mb: float
    tflops: float


def _points(metric: str, rows: Sequence[SweepRow]) -> list[SweepPoint]:
    return [
        SweepPoint(row.row, row.mean, row.sd or 0.0, row.up_mb or 0.0, row.tflops or 0.0)
        for row in rows
        if row.mean is not None and row.metric == metric
    ]


def front(metric: str, points: Sequence[SweepPoint], cost: str) -> list[SweepPoint]:
    """The points that no other beats in both score and cost, from the cheapest up."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    best: list[SweepPoint] = []
    for point in sorted(points, key=lambda one: (getattr(one, cost), -sign * one.mean)):
        if not best or sign * point.mean > sign * best[-1].mean:
            best.append(point)
    return best


@picture
def sweep_plot(metric: str, points: Sequence[SweepPoint], cost: str) -> Figure | None:
    """Mean score and its standard deviation against MB sent per client or TFLOP, a mark per row, and the front."""
    if not points:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.12 * len(points)), layout="constrained")
    axes = figure.add_subplot()
    for i, point in enumerate(points):
        mark, color = plots.MARKS[i // len(COLORS) % len(plots.MARKS)], COLORS[i % len(COLORS)]
        x, name = getattr(point, cost), short_name(point.row)
        axes.errorbar(x, point.mean, point.sd, fmt=mark, color=color, capsize=3, ms=6, label=name)
    best = front(metric, points, cost)
    axes.plot(
        [getattr(point, cost) for point in best], [point.mean for point in best], color="#888888", lw=0.8, zorder=0
    )
    costs = [getattr(point, cost) for point in points]
    if min(costs) > 0 and max(costs) > 20 * min(costs):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PlainNumbers())
        axes.xaxis.set_minor_formatter(PlainNumbers(labelOnlyBase=False))
    else:
        axes.ticklabel_format(axis="x", scilimits=(-3, 5))
    axes.set_xlabel("MB up per client\n(without the initial download)" if cost == "mb" else plots.AXES["flops"][0])
    axes.set_ylabel(f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else metric)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


Curves = dict[str, list[tuple[int, float, float]]]
"""Row -> of each scored round its number from 1, mean score and standard deviation over the seeds."""


def _curves(metric: str, stage: str, rows: Sequence[SweepRow], table: SweepTable) -> Curves:
    curves: Curves = {}
    for row in rows:
        if row.metric != metric or len(table.cells) > MOST_CURVES:
            continue
        scores: dict[int, list[float]] = {}
        for seed in row.seeds:
            folder = table.cells.get(f"{row.row}, seed {seed}")
            run = finished(folder) if folder else None
            part = upto(run, stage) if run else None
            for point in curve(part) if part else ():
                scores.setdefault(point.round + 1, []).append(point.score)
        whole = {at: values for at, values in scores.items() if len(values) == len(row.seeds)}
        if len(whole) > 1:
            curves[row.row] = [(at, fmean(v), stdev(v) if len(v) > 1 else 0.0) for at, v in sorted(whole.items())]
    return curves


@picture
def curves_plot(metric: str, curves: Curves) -> Figure | None:
    """Mean score after each round, a line per row, with bands of one standard deviation over the seeds."""
    if not curves:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.12 * len(curves)), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, line) in enumerate(curves.items()):
        rounds, means, deviations = zip(*line, strict=True)
        color = COLORS[i % len(COLORS)]
        axes.plot(rounds, means, color=color, marker="o", label=short_name(name))
        low = [mean - sd for mean, sd in zip(means, deviations, strict=True)]
        high = [mean + sd for mean, sd in zip(means, deviations, strict=True)]
        axes.fill_between(rounds, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    whole_numbers(axes)
    axes.set_ylabel(f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else metric)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
