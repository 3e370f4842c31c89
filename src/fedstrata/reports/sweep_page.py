"""The pages of a sweep: its table with pictures, and a page of each finished cell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.reports import plots
from fedstrata.reports.page import render, shown, write_page
from fedstrata.reports.picture import COLORS, picture, short_name
from fedstrata.reports.sweep import SweepRow, finished
from fedstrata.reports.sweep_files import read_table
from fedstrata.reports.sweep_text import by_stage, column_heads, note, table_cells

PAGE = "report.html"


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
        name=folder.resolve().name,
        note=note(table.rows, table.against),
        stages=[_stage(stage, rows) for stage, rows in by_stage(table.rows)],
        failed=list(failed.items()),
        cells=links,
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


def _stage(stage: str, rows: Sequence[SweepRow]) -> dict[str, Any]:
    caption = "Mean score over the seeds; the bars are one standard deviation up and down."
    metrics = dict.fromkeys(row.metric for row in rows if row.mean is not None)
    pictures = [(_picture(metric, rows), caption, True) for metric in metrics]
    return {
        "name": stage,
        "heads": column_heads(rows)[1:],
        "lines": [
            {"row": row.row, "method": row.method, "seeds": len(row.seeds), "words": cells[1:]}
            for row, cells in zip(rows, table_cells(rows), strict=True)
        ],
        "pictures": shown(iter(pictures)),
    }


def _picture(metric: str, rows: Sequence[SweepRow]) -> str:
    points = [
        (row.row, row.mean, row.sd or 0.0, row.up_mb or 0.0, row.tflops or 0.0)
        for row in rows
        if row.mean is not None and row.metric == metric
    ]
    return sweep_plot(metric, points)


@picture
def sweep_plot(metric: str, points: Sequence[tuple[str, float, float, float, float]]) -> Figure | None:
    """Mean score and its standard deviation against MB sent per client and against TFLOP, a mark per row.

    Args:
        metric: the score's name.
        points: of each row its name, mean, standard deviation, MB up per client, TFLOP of all clients.
    """
    if not points:
        return None
    figure = Figure(figsize=(11, 3.4 + 0.06 * len(points)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for place, (axes, label) in enumerate(
        zip(panels, ("MB up per client\n(without the initial download)", plots.AXES["flops"][0]), strict=True)
    ):
        for i, (name, mean, sd, *costs) in enumerate(points):
            mark, color = (
                plots.MARKS[i // len(COLORS) % len(plots.MARKS)],
                COLORS[i % len(COLORS)],
            )
            axes.errorbar(costs[place], mean, sd, fmt=mark, color=color, capsize=3, ms=6, label=short_name(name))
        axes.set_xlabel(label)
    panels[0].set_ylabel(f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else metric)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
