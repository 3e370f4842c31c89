"""The table of a sweep: a line per row and stage, over its seeds; for the terminal, as md, csv, json and tex."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text
from scipy.stats import ttest_rel

from fedstrata.cost.target import reached
from fedstrata.errors import UserError
from fedstrata.reports import plots
from fedstrata.reports.page import render, shown
from fedstrata.reports.runs import Run, load_run, upto
from fedstrata.reports.tables import MB, figure, result_rows
from fedstrata.sweeps.cells import Cell
from fedstrata.wire.store import write_bytes

NOTE = (
    "Score: mean ± standard deviation over the seeds; p: paired t-test over the seeds{against}. "
    "MB = 1 000 000 bytes per client over all rounds, without the start model; TFLOPs: training work of all "
    "clients, counted; seconds: clock time. Costs are means over the seeds, of a stage and those it starts from."
)
TARGETS = (
    " To target: rounds, and MB per client both ways, until the score of output.target was first reached, of the "
    "stage alone; means over the seeds that reached it."
)
COSTS = ("up_mb", "down_mb", "tflops", "seconds")
HEADS = {"up_mb": "MB up", "down_mb": "MB down", "tflops": "TFLOPs", "seconds": "seconds"}


@dataclass(frozen=True)
class Entry:
    """One row of a sweep in one stage.

    Attributes:
        row: the row's name.
        stage: the stage's name; empty for a job of one stage.
        method: its method, after those of the stages it starts from.
        metric: the headline.
        seeds: those that finished.
        scores: the headline score of each of them.
        mean: of the scores; None where nothing finished.
        sd: sample standard deviation of the scores; None with fewer than two.
        p: of a paired t-test of the scores with those of the row compared against; None where there is none.
        up_mb: MB sent per client; this and the costs below are means over the seeds, of the stage and of those it
            starts from.
        down_mb: MB received per client, without the start model.
        setup_mb: MB of start model per client.
        tflops: 10^12 FLOPs of all clients' training.
        seconds: clock time.
        metrics: every metric -> its value for each seed.
        failed: seed -> why it has no score.
        target: the score to which the following are counted; None where none is set.
        reached: number of seeds that reached it.
        rounds_to_target: mean rounds until they first did, of the stage alone.
        mb_to_target: mean MB per client, sent and received, until then.
    """

    row: str
    stage: str
    method: str
    metric: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    mean: float | None
    sd: float | None
    p: float | None
    up_mb: float | None
    down_mb: float | None
    setup_mb: float | None
    tflops: float | None
    seconds: float | None
    metrics: Mapping[str, tuple[float, ...]]
    failed: Mapping[int, str]
    target: float | None = None
    reached: int = 0
    rounds_to_target: float | None = None
    mb_to_target: float | None = None


def write_tables(folder: Path, cells: Sequence[Cell], against: str | None) -> list[Entry]:
    """Sum up the cells on disk: ``table.json``, ``.csv``, ``.md`` and ``.tex``, ``cells.csv``, ``report.html``.

    Returns:
        The table's lines, stage by stage.
    """
    runs = {(cell.row, cell.seed): _finished(cell.folder) for cell in cells}
    why = {(cell.row, cell.seed): _why(cell.folder) for cell in cells if runs[cell.row, cell.seed] is None}
    rows = {cell.row: cell.base for cell in cells}
    targets = {cell.row: cell.target for cell in cells}
    stages = dict.fromkeys(stage.result["stage"] for run in runs.values() if run for stage in run.each) or [""]
    entries = []
    for stage in stages:
        found = {
            row: {
                seed: one
                for (name, seed), run in runs.items()
                if name == row and run and (one := upto(run, stage))
            }
            for row in rows
        }
        for row, base in rows.items():
            failed = {seed: reason for (name, seed), reason in why.items() if name == row}
            entry = _entry(row, stage, found[row], failed, _scores(found[base]) if base else {})
            target = targets[row] if stage == list(stages)[-1] else None
            entries.append(entry if target is None else replace(entry, **_to_target(target, found[row])))
    table = {"against": against, "entries": [asdict(entry) for entry in entries]}
    write_bytes(folder / "table.json", json.dumps(table, indent=1, ensure_ascii=False).encode())
    write_bytes(folder / "table.csv", _csv([_flat(entry) for entry in entries]).encode())
    write_bytes(folder / "cells.csv", _csv(_each(entries)).encode())
    write_bytes(folder / "table.md", markdown(entries, against).encode())
    write_bytes(folder / "table.tex", latex(entries, against).encode())
    _page(folder, entries, against, cells)
    return entries


def read_tables(folder: Path) -> tuple[str | None, list[Entry]]:
    """The row compared against and the lines of a sweep's table, as :func:`write_tables` wrote them.

    Raises:
        UserError: the folder holds none.
    """
    try:
        data = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        return data["against"], [_read(entry) for entry in data["entries"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: holds no sweep's table ({type(error).__name__}: {error})") from None


def _read(entry: dict[str, Any]) -> Entry:
    """An entry off JSON, which knows neither tuples nor numbers as keys."""
    return Entry(
        **{
            **entry,
            "seeds": tuple(entry["seeds"]),
            "scores": tuple(entry["scores"]),
            "metrics": {name: tuple(values) for name, values in entry["metrics"].items()},
            "failed": {int(seed): why for seed, why in entry["failed"].items()},
        }
    )


def terminal(entries: Sequence[Entry]) -> Iterable[Table]:
    """A table per stage for a terminal of 80 columns: beside targets there is no room for work and time."""
    for stage, lines in _by_stage(entries):
        metric = _metric(lines)
        title = f"{stage}: {metric}" if stage else metric
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
        table.add_column("row", overflow="fold")
        heads = ["row", "score", *_heads(lines)[2:]]
        targets = heads[len(HEADS) + 3 :]
        shown = [i for i, head in enumerate(heads) if not (targets and head in ("TFLOPs", "seconds"))]
        for i in shown[1:]:
            table.add_column(heads[i].replace(" to ", "\nto "), justify="right", no_wrap=True)
        for words in _words(lines):
            words[1] = re.sub(r"^([a-z]\w*) ", r"\1\n", words[1])
            words[len(HEADS) + 3 :] = [word.replace(" (", "\n(") for word in words[len(HEADS) + 3 :]]
            table.add_row(*(Text(words[i]) for i in shown))
        yield table


def note(entries: Sequence[Entry], against: str | None) -> str:
    """What the table's columns say."""
    targets = TARGETS if any(entry.target is not None for entry in entries) else ""
    return NOTE.format(against=f" with {against!r}" if against else "") + targets


def markdown(entries: Sequence[Entry], against: str | None) -> str:
    """The table in Markdown, a section per stage."""
    made = []
    for stage, lines in _by_stage(entries):
        heads = _heads(lines)
        made.append(f"### {stage}\n" if stage else "")
        made.append("| " + " | ".join(heads) + " |\n|---|" + "---:|" * (len(heads) - 1))
        made += ["| " + " | ".join(word.replace("|", "\\|") for word in words) + " |" for words in _words(lines)]
        made.append("")
    return "\n".join([*made, note(entries, against), ""]).lstrip()


def latex(entries: Sequence[Entry], against: str | None) -> str:
    """The table in LaTeX (package booktabs), a tabular per stage."""
    made = []
    for stage, lines in _by_stage(entries):
        heads = _heads(lines)
        body = [" & ".join(map(_tex, cells)) + r" \\" for cells in (heads, *_words(lines))]
        made += [f"% stage {stage}"] if stage else []
        made += [r"\begin{tabular}{l" + "r" * (len(heads) - 1) + "}", r"\toprule", body[0], r"\midrule"]
        made += [*body[1:], r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([*made, f"% {note(entries, against)}", ""])


def _page(folder: Path, entries: Sequence[Entry], against: str | None, cells: Sequence[Cell]) -> None:
    stages = []
    for stage, lines in _by_stage(entries):
        caption = "Mean score over the seeds; the bars are one standard deviation up and down."
        pictures = [
            (
                plots.sweep_plot(
                    metric,
                    [
                        (e.row, e.mean, e.sd or 0.0, e.up_mb or 0.0, e.tflops or 0.0)
                        for e in lines
                        if e.mean is not None and e.metric == metric
                    ],
                ),
                caption,
                True,
            )
            for metric in dict.fromkeys(e.metric for e in lines if e.mean is not None)
        ]
        stages.append(
            {
                "name": stage,
                "heads": _heads(lines)[1:],
                "lines": [
                    {"row": entry.row, "method": entry.method, "seeds": len(entry.seeds), "words": words[1:]}
                    for entry, words in zip(lines, _words(lines), strict=True)
                ],
                "pictures": shown(iter(pictures)),
            }
        )
    failed = {f"{entry.row}, seed {seed}": why for entry in entries for seed, why in entry.failed.items()}
    pages = [(str(cell), cell.folder.relative_to(folder) / "report.html") for cell in cells]
    render(
        folder / "report.html",
        "sweep.html.j2",
        name=folder.resolve().name,
        note=note(entries, against),
        stages=stages,
        failed=list(failed.items()),
        cells=[(cell, page.as_posix()) for cell, page in pages if (folder / page).exists()],
    )


def _entry(
    row: str, stage: str, runs: Mapping[int, Run], failed: Mapping[int, str], base: Mapping[int, float]
) -> Entry:
    scores = _scores(runs)
    first: dict[str, Any] = {"headline": "", "score": {}}
    first = next((run.result for run in runs.values()), first)
    costs = result_rows(list(runs.values()))
    both = [seed for seed in scores if seed in base]
    values = list(scores.values())
    return Entry(
        row=row,
        stage=stage,
        method=next((line["method"] for line in costs), ""),
        metric=first["headline"],
        seeds=tuple(scores),
        scores=tuple(values),
        mean=fmean(values) if values else None,
        sd=stdev(values) if len(values) > 1 else None,
        p=paired([scores[seed] for seed in both], [base[seed] for seed in both]),
        up_mb=_mean(line["up_mb"] for line in costs),
        down_mb=_mean(line["down_mb"] for line in costs),
        setup_mb=_mean(line["setup_mb"] for line in costs),
        tflops=_mean(line["tflops"] for line in costs),
        seconds=_mean(line["seconds"] for line in costs),
        metrics={
            name: tuple(run.result["score"][name] for run in runs.values())
            for name in first["score"]
            if all(name in run.result["score"] for run in runs.values())
        },
        failed=dict(failed),
    )


def _to_target(target: float, runs: Mapping[int, Run]) -> dict[str, Any]:
    """The last fields of an :class:`Entry`."""
    met = []
    for run in runs.values():
        last = run.each[-1]
        if there := reached(target, last.result["headline"], last.rounds, last.ledger):
            met.append((there.rounds, sum(there.bytes.values()) / len(last.clients) / MB))
    return {
        "target": target,
        "reached": len(met),
        "rounds_to_target": _mean(rounds for rounds, _ in met),
        "mb_to_target": _mean(mb for _, mb in met),
    }


def paired(scores: Sequence[float], base: Sequence[float]) -> float | None:
    """p of a two-sided paired t-test; None with fewer than two pairs or where all differences are the same."""
    if len({one - other for one, other in zip(scores, base, strict=True)}) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal differences: still a p
        return float(ttest_rel(scores, base).pvalue)


def _scores(runs: Mapping[int, Run]) -> dict[int, float]:
    made = {seed: result_rows([run])[0]["score"] for seed, run in runs.items()}
    return {seed: score for seed, score in made.items() if score is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _finished(folder: Path) -> Run | None:
    run = load_run(folder) if (folder / "result.json").exists() else None
    return run if run and run.result["status"] == "finished" else None


def _why(folder: Path) -> str:
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8").strip() if path.exists() else "not run"


def _by_stage(entries: Sequence[Entry]) -> Iterable[tuple[str, list[Entry]]]:
    for stage in dict.fromkeys(entry.stage for entry in entries):
        yield stage, [entry for entry in entries if entry.stage == stage]


def _metric(lines: Sequence[Entry]) -> str:
    """The metric of all lines; where they differ each score has its own before it."""
    metrics = {entry.metric for entry in lines if entry.metric}
    return metrics.pop() if len(metrics) == 1 else "score"


def _heads(lines: Sequence[Entry]) -> list[str]:
    targets = ["rounds to target", "MB to target"] if any(entry.target is not None for entry in lines) else []
    return ["row", _metric(lines), "p", *HEADS.values(), *targets]


def _words(lines: Sequence[Entry]) -> list[list[str]]:
    """The cells of each line, as many as :func:`_heads`."""
    columns = len(_heads(lines))
    mixed = _metric(lines) == "score"
    made = []
    for entry in lines:
        score = "–" if entry.mean is None else f"{entry.mean:.4f}"
        score += "" if entry.sd is None else f" ± {entry.sd:.4f}"
        score = f"{entry.metric} {score}" if mixed and entry.mean is not None else score
        if entry.failed:
            score += f" ({len(entry.seeds)} of {len(entry.seeds) + len(entry.failed)})"
        p = "" if entry.p is None else "<0.001" if entry.p < 0.001 else f"{entry.p:.3f}"
        words = [entry.row, score, p, *(figure(getattr(entry, key)) for key in COSTS)]
        some = f" ({entry.reached} of {len(entry.seeds)})" if 0 < entry.reached < len(entry.seeds) else ""
        if entry.target is not None:
            words += [f"{figure(entry.rounds_to_target)}{some}", figure(entry.mb_to_target)]
        made.append(words + [""] * (columns - len(words)))
    return made


def _flat(entry: Entry) -> dict[str, Any]:
    """The entry without its per-seed values, which are in ``cells.csv``."""
    made = {key: value for key, value in asdict(entry).items() if key not in ("metrics", "failed", "scores")}
    return {**made, "seeds": len(entry.seeds), "failed": len(entry.failed)}


def _each(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A line per row, stage, seed and metric."""
    return [
        {"row": entry.row, "stage": entry.stage, "seed": seed, "metric": name, "value": value}
        for entry in entries
        for name, values in entry.metrics.items()
        for seed, value in zip(entry.seeds, values, strict=True)
    ]


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return text.getvalue()


def _tex(word: str) -> str:
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "<": "$<$", "–": "--", "→": r"$\to$"}
    special |= {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    return "".join(special.get(letter, letter) for letter in word)
