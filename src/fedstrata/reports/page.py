"""The report: one HTML page that needs nothing else, neither a network nor a script."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedstrata.errors import UserError
from fedstrata.reports import plots
from fedstrata.reports.audit import Stage, audit_lines, audit_rows, audit_title
from fedstrata.reports.downloads import links
from fedstrata.reports.html_table import Head, HtmlTable
from fedstrata.reports.picture import Shown
from fedstrata.reports.privacy import privacy_lines
from fedstrata.reports.runs import Run, curve
from fedstrata.reports.summary import client_sentences, summary
from fedstrata.reports.tables import client_rows, figure, note, result_rows, score_figure, shown_rows
from fedstrata.reports.templates import templates
from fedstrata.wire.files import write_bytes
from fedstrata.wire.foreign import visible


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
        names=", ".join(row["run"] for row in rows),
        overview=_overview(rows),
        note=note(rows),
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
    if is_foreign(path):
        raise UserError(f"report: {path} is there and is no page of FedStrata; --out names another file")
    page = visible(templates().get_template(template).render(**values))
    write_bytes(path, _unique_ids(page).encode())
    return path


def is_foreign(path: Path) -> bool:
    """Whether a file is there that no report is, which must not be written over."""
    return path.exists() and b"<title>FedStrata" not in path.read_bytes()[:1000]


def shown(pictures: Iterable[Shown]) -> list[dict[str, Any]]:
    """Pictures as a template takes them: described SVG, caption and downloads; empty ones are dropped."""
    return [
        {"svg": _described(one), "caption": one.caption, "downloads": links(one.title, one.records, one.svg)}
        for one in pictures
        if one.svg
    ]


def _described(one: Shown) -> Markup:
    """A picture that says to a screen reader what it is."""
    words = f"<title>{escape(one.title)}</title><desc>{escape(one.caption)}</desc>"
    begin, end, rest = one.svg.partition(">")
    return Markup(begin + ' role="img"' + end + words + rest)


def _overview(rows: Sequence[dict[str, Any]]) -> HtmlTable:
    """The runs beside one another."""
    heads = (
        *(Head(name, words=True) for name in ("run", "method", "task", "status")),
        *(Head(name) for name in ("score", "baseline", "clients", "rounds")),
        *(Head(f"MB {what}", "per client") for what in ("up", "down", "initial download")),
        Head("MB up + down", "all clients"),
        Head("TFLOP", "all clients"),
        Head("seconds", "wall time"),
    )
    cells = [
        [
            *(str(row[key]) for key in ("run", "method", "task", "status")),
            _score_words(row),
            score_figure(row["baseline"]),
            str(row["clients"]),
            f"{row['rounds']}" if row["status"] == "finished" else f"{row['done']} of {row['rounds']}",
            *(figure(row[key]) for key in ("up_mb", "down_mb", "setup_mb", "total_mb", "tflops")),
            f"{row['seconds']:,.1f}",
        ]
        for row in rows
    ]
    return HtmlTable("Runs", heads, cells, [f"#run-{i}" for i in range(1, len(rows) + 1)])


def _score_words(row: dict[str, Any]) -> str:
    spread = "" if row["spread"] is None else f" ± {score_figure(row['spread'])}"
    return (
        score_figure(None) if row["score"] is None else f"{row['headline']} {score_figure(row['score'])}{spread}"
    )


def _comparison(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Score against cost over several runs, apart for every headline: a loss and an accuracy share no axis."""
    if len(runs) < 2:
        return []
    alike: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        alike[run.result["headline"]].append(run)
    staged = any(run.stages for run in runs)
    cost_note = " A run with stages starts where its earlier stages ended." if staged else ""
    notes = dict.fromkeys(plots.CURVES, cost_note)
    notes["round"] = " Of a run with stages the rounds of the last." if staged else ""
    return shown(
        Shown(
            f"{metric} of all runs against {what}",
            plots.score_plot(group, cost),
            f"The score against {what}.{notes[cost]}",
            [
                {"run": run.name, **point._asdict(), "round": point.round + 1}
                for run in group
                for point in curve(run)
            ],
        )
        for metric, group in alike.items()
        for cost, what in plots.CURVES.items()
    )


def _run(run: Run, row: dict[str, Any], audit: Sequence[Stage]) -> dict[str, Any]:
    stages = [
        {**_stage(stage, "h4" if run.stages else "h3"), "name": stage.name if run.stages else ""}
        for stage in run.stage_runs
    ]
    return {
        "row": row,
        "message": run.result["message"] or "",
        "summary": summary(run) if run.stages else "",
        "privacy": privacy_lines(run.result.get("privacy")) if run.stages else [],
        "stages": stages,
        "audits": _audits(audit),
    }


def _audits(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """What an audit found, a table and sentences for each stage."""
    return [
        {"title": audit_title(stage), "table": _audit_table(stage), "lines": audit_lines(stage)}
        for stage in stages
    ]


def _audit_table(stage: Stage) -> HtmlTable | None:
    """A line for each figure of an audit; None without any."""
    heads = (
        *(Head(name, words=True) for name in ("read from", "setting", "attack", "figure")),
        *(Head(name) for name in ("value", "95 %", "chance")),
    )
    keys = ("channel", "setting", "attack", "figure", "value", "interval", "chance")
    cells = [[row[key] for key in keys] for row in audit_rows(stage)]
    return HtmlTable("Audit", heads, cells) if cells else None


def _stage(stage: Run, level: str) -> dict[str, Any]:
    rows, others = shown_rows(stage, client_rows(stage))
    return {
        "summary": summary(stage),
        "privacy": privacy_lines(stage.result.get("privacy")),
        "pictures": shown(plots.run_pictures(stage)),
        "classes": _classes_table(stage) if stage.classes else None,
        "sentences": client_sentences(stage),
        "clients": _clients_table(stage, rows) if rows else None,
        "others": others,
        "level": level,
        "job": _job(stage.job),
    }


def _classes_table(stage: Run) -> HtmlTable:
    """A line for each class, or type of entity, of the final model on the test rows."""
    heads = [Head("class", words=True), *map(Head, ("precision", "recall", "F1", "examples"))]
    cells = [
        [one["class"], *(score_figure(one[key]) for key in ("precision", "recall", "f1")), f"{one['examples']:,}"]
        for one in stage.classes["classes"]
    ]
    return HtmlTable(f"Classes {stage.name}", heads, cells)


def _clients_table(stage: Run, rows: Sequence[dict[str, Any]]) -> HtmlTable:
    """A line for each client."""
    scored = any(row["score"] is not None for row in rows)
    heads = [
        Head("client", words=True),
        *(Head(name) for name in ("examples", "rounds", "MB up", "MB down", "TFLOP")),
        Head("seconds", "wall time"),
        Head("last training loss"),
        *([Head(stage.result["headline"], "own score")] if scored else []),
    ]
    cells = [
        [
            row["client"],
            f"{row['examples']:,}",
            str(row["rounds"]),
            *(figure(row[key]) for key in ("up_mb", "down_mb", "tflops")),
            "–" if row["seconds"] is None else f"{row['seconds']:,.1f}",
            score_figure(row["loss"]),
            *([score_figure(row["score"])] if scored else []),
        ]
        for row in rows
    ]
    return HtmlTable(f"Clients {stage.name}", heads, cells)


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
