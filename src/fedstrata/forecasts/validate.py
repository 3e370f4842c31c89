"""A job checked to the end without training: rows, model, plans, engine and costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.data.facts import holders, row_facts, row_lines, rows_seen_before
from fedstrata.data.prepare import data_notes, dropped_rows, prepare, prepare_test
from fedstrata.errors import plural
from fedstrata.events import Event
from fedstrata.forecasts.forecast import forecast
from fedstrata.forecasts.options import ForecastOptions
from fedstrata.job.file import JobSource, Overrides, load, sweep_table
from fedstrata.job.tables import method_name
from fedstrata.models.fresh_torch import fresh_torch
from fedstrata.models.quiet import quiet
from fedstrata.runs.folder import check_output_dir
from fedstrata.runs.notes import without_effect
from fedstrata.runs.stages import check_stages


@dataclass(frozen=True)
class Checked:
    """What a job would do.

    Attributes:
        lines: rows, classes and engine of each stage, a sentence each.
        costs: as :func:`fedstrata.forecast` gives them.
    """

    lines: list[str]
    costs: dict[str, dict[str, Any]]


@quiet()
@fresh_torch()
def validate(
    source: JobSource, overrides: Overrides = (), tell: Callable[[Event], None] = lambda event: None
) -> Checked:
    """Check a job as :func:`fedstrata.run` would before it trains.

    Raises:
        UserError: what the run would refuse.
    """
    jobs = load(source, overrides)
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else None
    kind = "sweep" if sweep_table(source)[1] else "run"
    check_output_dir(Path(jobs[0].output.dir), resume=True, kind=kind)
    data = [prepare_test(job, base_dir) if job.between_sites else prepare(job, base_dir) for job in jobs]
    with tempfile.TemporaryDirectory() as outlines:
        parts = check_stages(jobs, data, base_dir, Path(outlines), tell)
    lines, seen = [], rows_seen_before(jobs, data)
    for job, rows, own in zip(jobs, data, parts, strict=True):
        name = f"stage {job.stage}: " if job.stage else ""
        lines.append(f"{name}{method_name(job.method)}, {job.task.kind}, {plural(job.method.rounds, 'round')}")
        lines.append(f"model   {plural(own.depth, 'layer')} of width {own.hidden}")
        sizes = {client: len(index) for client, index in holders(job, rows).items()}
        lines += [f"data    {line}" for line in row_lines(row_facts(job, rows), sizes)]
        if rows.dropped:
            lines.append(f"data    {dropped_rows(rows)}")
        unread = without_effect(job, own, list(rows.shards))
        lines += [f"note    {line}" for line in (*data_notes(job, rows), *unread)]
        lines += [f"note    {seen[job.stage]}"] if job.stage in seen else []
    return Checked(lines, forecast(source, overrides, ForecastOptions(tell=tell)))
