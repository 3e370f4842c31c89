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

from fedstrata.reports import plots
from fedstrata.reports.runs import Run, curve, parts
from fedstrata.reports.tables import NOTE, client_rows, figure, result_rows, score_figure

STATUS = {
    "finished": "The run finished",
    "stopped": "The run stopped before its end",
    "failed": "The run failed",
}


def write_page(runs: Sequence[Run], path: Path) -> Path:
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
        runs=[_run(run, row) for run, row in zip(runs, rows, strict=True)],
    )


def render(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of this folder, write the page to ``path`` and return ``path``.

    Raises:
        OSError: ``path`` cannot be written.
    """
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
    path.write_text(_own_ids(page), encoding="utf-8")
    return path


def summary(run: Run) -> str:
    """What was trained, by whom, what came of it and what it cost, in plain sentences; of a run or a stage."""
    row = result_rows([run])[0]
    work = _stages(run) if run.stages else _work(run)
    return " ".join(filter(None, [work, _outcome(run, row), _cost(run, row), _missed(run)]))


def part_words(names: Sequence[str]) -> str:
    """Parts for a reader, layers drawn together: ``embeddings, layers 0–3, head``."""
    words: list[str] = []
    layers = [int(name.removeprefix("layer.")) for name in names if name.startswith("layer.")]
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1].append(layer)
        else:
            spans.append([layer])
    if layers:
        ranges = [f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
        words = [("layer " if len(layers) == 1 else "layers ") + ", ".join(ranges)]
    before = [name for name in names if name == "embeddings"]
    after = [name for name in names if name != "embeddings" and not name.startswith("layer.")]
    return ", ".join([*before, *words, *after])


def _work(run: Run) -> str:
    rounds = len({line["round"] for line in run.work})
    planned = run.job.get("method", {}).get("rounds", rounds)
    by = f"by {run.result['method']} ({run.result['task']})"
    if planned == 0:
        return f"Nothing was trained ({run.result['task']}): the start model is scored and handed on."
    if not rounds:
        return f"No client finished a round {by}."
    trained, sent = ([name for name in parts(run) if name in _named(run, key)] for key in ("trained", "sent"))
    did = f"trained {part_words(trained) or 'nothing'}"
    if sent == trained:
        did = f"trained and sent {part_words(trained)}"
    elif sent:
        did += f" and sent {part_words(sent)},"
    if server := [name for name in parts(run) if any(name in line.get("server", ()) for line in run.work)]:
        did += f"{'' if did.endswith(',') else ','} the server {part_words(server)},"
    many = _count(len(run.clients), "client")
    examples = sum(row["examples"] for row in client_rows(run))
    so_many = f"{rounds} of {planned} rounds" if rounds < planned else _count(rounds, "round")
    return f"{many} with {_count(examples, 'example')} {did} {by} in {so_many}."


def _stages(run: Run) -> str:
    names = ", then ".join(stage.name for stage in run.stages)
    return f"A job of {_count(len(run.stages), 'stage')}: {names}. Scores are the last stage's, costs are sums."


def _named(run: Run, key: str) -> set[str]:
    return {name for line in run.work for name in line[key]}


def _outcome(run: Run, row: dict[str, Any]) -> str:
    status = STATUS.get(row["status"], f"The run is {row['status']}")
    if row["score"] is None:
        return f"{status}; no score was recorded."
    score = f"{row['headline']} {score_figure(row['score'])}"
    if row["spread"] is not None:
        score += f" ± {score_figure(row['spread'])} (mean and standard deviation of the clients' own models)"
    start = [point.score for point in curve(run) if point.round == -1]
    return f"{status} with {score}" + (f"; the start model had {score_figure(start[0])}." if start else ".")


def _cost(run: Run, row: dict[str, Any]) -> str:
    wire = (
        f"Each client sent {figure(row['up_mb'])} MB and received {figure(row['down_mb'])} MB on average, "
        f"after {figure(row['setup_mb'])} MB for the start model."
    )
    if not row["total_mb"]:
        wire = f"Nothing crossed the wire but the start model, {figure(row['setup_mb'])} MB per client."
    if not row["total_mb"] and not row["setup_mb"]:
        wire = "Nothing crossed the wire."
    split = any(line.get("server") for stage in run.each for line in stage.work)
    who = "Clients and server" if split else "All clients"
    work = f"{who} together computed {figure(row['tflops'])} TFLOPs"
    return f"{wire} {work}; the clock showed {_clock(row['seconds'])}."


def _missed(run: Run) -> str:
    """Who did not answer, when and why."""
    rounds: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for line in run.result.get("missing") or ():
        rounds[line["client"], line["reason"]].add(line["round"])
    made = []
    for (client, reason), each in rounds.items():
        listed = ", ".join(map(str, sorted(each)))
        made.append(f"Without {client} in {'round' if len(each) == 1 else 'rounds'} {listed}: it {reason}.")
    return " ".join(made)


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


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
    caption = f"The score against what had crossed the wire, and against the work done, by then.{note}"
    return shown((plots.score_plot(group, "bytes", "flops"), caption, True) for group in alike.values())


def _run(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    stages = [
        {
            "name": stage.name if run.stages else "",
            "summary": summary(stage),
            "pictures": shown(_pictures(stage)),
            "clients": client_rows(stage),
            "headline": stage.result["headline"],
            "scored": any(row["score"] is not None for row in client_rows(stage)),
            "job": _job(stage.job),
        }
        for stage in run.each
    ]
    message = run.result["message"] or ""
    return {"row": row, "message": message, "summary": summary(run) if run.stages else "", "stages": stages}


def _pictures(run: Run) -> Iterator[tuple[str, str, bool]]:
    """Picture, caption, and whether it is as wide as the page."""
    scores = "The score after each round, against what had crossed the wire, and against the work done, by then."
    yield plots.score_plot([run], "round", "bytes", "flops"), scores, True
    yield plots.loss_plot(run), "Training loss of the clients, each on its own examples.", False
    if run.work:
        client = next((line["client"] for line in run.work if line["trained"]), run.work[0]["client"])
        yield plots.schedule_plot(run, client), f"Parts at {client}, round by round. {_alike(run)}", False
    setup = figure(result_rows([run])[0]["setup_mb"])
    wire = "What crossed the wire, by part: training and evaluation together."
    yield plots.bytes_plot(run), f"{wire} The start model, {setup} MB per client, is not in it.", True
    tested, left_out = _count(run.split.get("test", 0), "example"), run.split.get("left_out", 0)
    yield (
        plots.split_plot(run.split),
        f"What each client held. {tested} to test on; {left_out:,} rows left out.",
        True,
    )


def _alike(run: Run) -> str:
    """Whether the picture of one client stands for all."""
    seen: dict[int, list[list[Any]]] = defaultdict(list)
    for line in run.work:
        seen[line["round"]].append([line["layers"], line["trained"]])
    if all(each == first for first, *rest in seen.values() for each in rest):
        return "All clients did the same."
    return "Other clients built other deeper layers in the same round."


def shown(pictures: Iterator[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """Pictures as a template takes them: SVG, caption, and whether as wide as the page; empty ones left out."""
    return [{"svg": Markup(svg), "caption": caption, "wide": wide} for svg, caption, wide in pictures if svg]


def _job(job: dict[str, Any]) -> str:
    """The resolved job in the form of its file."""
    tables = {name: table for name, table in job.items() if isinstance(table, dict)}
    single = {name: value for name, value in job.items() if name not in tables}
    blocks = [_keys(single)] if single else []
    return "\n\n".join(blocks + [f"[{name}]\n{_keys(table)}" for name, table in tables.items()])


def _keys(table: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())


def _own_ids(page: str) -> str:
    """Number the ids of the pictures (clips, markers): the same id twice is not legal on a page."""
    number = itertools.count(1)

    def renamed(svg: re.Match[str]) -> str:
        prefix = f"picture-{next(number)}-"
        return re.sub(r'(id="|href="#|url\(#)(?=\w[0-9a-f]{10}[")])', rf"\g<1>{prefix}", svg.group())

    return re.sub(r"<svg.*?</svg>", renamed, page, flags=re.DOTALL)
