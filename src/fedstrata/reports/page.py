"""The report: one HTML page that needs nothing else, neither a network nor a script."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedstrata.errors import UserError
from fedstrata.reports import plots
from fedstrata.reports.audit import Stage, audit_lines, audit_rows, audit_title
from fedstrata.reports.runs import Run
from fedstrata.reports.summary import summary
from fedstrata.reports.tables import NOTE, client_rows, figure, result_rows, score_figure, shown_rows


def write_page(runs: Sequence[Run], path: Path, audits: Sequence[Sequence[Stage]] = ()) -> Path:
    """Write the report of one or more runs to ``path``, whose folder is made, and return ``path``.

    The same runs give the same bytes.

    Raises:
        OSError: ``path`` cannot be written.
    """
    rows = result_rows(runs)
    return render(
        path,
        "page.html.j2",
        rows=rows,
        note=NOTE,
        comparison=_comparison(runs),
        runs=[
            _run(run, row, audit) for run, row, audit in zip(runs, rows, audits or [()] * len(rows), strict=True)
        ],
    )


def render(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of this folder, write the page to ``path`` and return ``path``.

    Raises:
        OSError: ``path`` cannot be written.
        UserError: there is a file that no report is.
    """
    if path.exists() and b"<title>FedStrata" not in path.read_bytes()[:1000]:
        raise UserError(f"report: {path} is there and is no page of FedStrata; --out names another file")
    templates = Environment(
        loader=PackageLoader("fedstrata", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(figure=figure, score_figure=score_figure)
    page = templates.get_template(template).render(**values)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_unique_ids(page), encoding="utf-8")
    return path


def shown(pictures: Iterator[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """Pictures as a template takes them: SVG, caption, and whether as wide as the page; empty ones dropped."""
    return [{"svg": Markup(svg), "caption": caption, "wide": wide} for svg, caption, wide in pictures if svg]


def _comparison(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Score against cost over several runs, apart for every headline: a loss and an accuracy share no axis."""
    if len(runs) < 2:
        return []
    alike: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        alike[run.result["headline"]].append(run)
    note = (
        "" if not any(run.stages for run in runs) else " A run with stages starts where its earlier stages ended."
    )
    caption = f"The score against {plots.CURVES}.{note}"
    return shown((plots.score_plot(group, "bytes", "flops"), caption, True) for group in alike.values())


def _run(run: Run, row: dict[str, Any], audit: Sequence[Stage]) -> dict[str, Any]:
    stages = [{**_stage(stage), "name": stage.name if run.stages else ""} for stage in run.stage_runs]
    message = run.result["message"] or ""
    return {
        "row": row,
        "message": message,
        "summary": summary(run) if run.stages else "",
        "stages": stages,
        "audits": _audits(audit),
    }


def _audits(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """What an audit found, a table and sentences for each stage."""
    return [
        {"title": audit_title(stage), "rows": audit_rows(stage), "lines": audit_lines(stage)} for stage in stages
    ]


def _stage(stage: Run) -> dict[str, Any]:
    rows, others = shown_rows(stage, client_rows(stage))
    return {
        "summary": summary(stage),
        "pictures": shown(plots.run_pictures(stage)),
        "clients": rows,
        "others": others,
        "headline": stage.result["headline"],
        "scored": any(row["score"] is not None for row in rows),
        "job": _job(stage.job),
    }


def _job(job: dict[str, Any]) -> str:
    """The resolved job in the form of its file."""
    tables = {name: table for name, table in job.items() if isinstance(table, dict)}
    single = {name: value for name, value in job.items() if name not in tables}
    blocks = [_keys(single)] if single else []
    return "\n\n".join(blocks + [f"[{name}]\n{_keys(table)}" for name, table in tables.items()])


def _keys(table: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())


def _unique_ids(page: str) -> str:
    """Number the ids of the pictures (clips, markers): on a page no two may be the same."""
    number = itertools.count(1)

    def renamed(svg: re.Match[str]) -> str:
        prefix = f"picture-{next(number)}-"
        return re.sub(r'(id="|href="#|url\(#)(?=\w[0-9a-f]{10}[")])', rf"\g<1>{prefix}", svg.group())

    return re.sub(r"<svg.*?</svg>", renamed, page, flags=re.DOTALL)
