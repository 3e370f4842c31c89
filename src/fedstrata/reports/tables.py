"""The numbers of a report, in one place, and the table of them for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.errors import plural
from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.reports.runs import Run, headline, score

MB = 10**6
"""Bytes in an MB; the report knows no MiB."""
TERA = 10**12
"""FLOPs in a TFLOP."""
ROWS_SHOWN = 200
"""Most clients that a page lists."""
NOTE = (
    "MB = 1 000 000 bytes: mean per client over all rounds, without the initial download. "
    "TFLOP: work counted over all clients, not wall time. Baseline: the score of always predicting the most "
    "frequent class, or the mean."
)
SPREAD = " ±: mean and standard deviation over the clients."


def result_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per run: what it gave and what it cost.

    Of a run with stages the score is the last stage's and the costs are sums over the stages. A run without a
    server model has as score the mean over its clients, and beside it ``spread``, their standard deviation.
    ``baseline`` is the score of always predicting the most frequent class, or the mean.
    ``up_mb``, ``down_mb`` and ``setup_mb`` (the initial download) are MB per client, ``total_mb`` is up and down
    of all clients, ``tflops`` is 10^12 FLOPs of all clients, ``seconds`` is wall time. What is not known is None.
    """
    return [_row(run) for run in runs]


def note(rows: Sequence[dict[str, Any]]) -> str:
    """What stands below rows of :func:`result_rows`: units, and words that one must know to read them."""
    return NOTE + (SPREAD if any(row["spread"] is not None for row in rows) else "")


def client_rows(run: Run) -> list[dict[str, Any]]:
    """One row per client of a run or stage, from its own lines.

    ``rounds`` counts those in which the client answered; ``up_mb`` and ``down_mb`` are MB after setup, ``tflops``
    10^12 FLOPs, ``seconds`` wall time, ``loss`` the last one; ``score`` is the headline's. What is not known is
    None.
    """
    rows, told = [], tell_work(run)
    work_of, moved = by_client(run.work), run.bytes_by_client
    for client in run.clients:
        work = work_of[client]
        record = run.result["clients"].get(client) or run.partition["clients"][client]
        rows.append(
            {
                "client": client,
                "examples": record["examples"],
                "rounds": len(work),
                "up_mb": moved[client, "up"] / MB,
                "down_mb": moved[client, "down"] / MB,
                "tflops": sum(line["flops"] for line in work) / TERA if told else None,
                "seconds": sum(line["seconds"] for line in work) if told else None,
                "loss": work[-1]["loss"] if work else None,
                "score": headline(run, record.get("score")),
            }
        )
    return rows


def tell_work(run: Run) -> bool:
    """Whether the clients say what they computed, and for how long; sites that add noise do not."""
    return all((stage.result.get("privacy") or {}).get("noise_from") != "sites" for stage in run.stage_runs)


def shown_rows(run: Run, rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Of very many rows of :func:`client_rows` those to look at, in their order, and a sentence on the others.

    They are the clients with the worst scores; without scores, those with the most examples.
    """
    if len(rows) <= ROWS_SHOWN:
        return list(rows), ""
    scored = [i for i, row in enumerate(rows) if row["score"] is not None]
    sign = -1 if run.result["headline"] in LOWER_IS_BETTER else 1
    if scored:
        chosen, which = sorted(scored, key=lambda i: (sign * rows[i]["score"], i)), "with the worst scores"
    else:
        chosen, which = sorted(range(len(rows)), key=lambda i: (-rows[i]["examples"], i)), "with the most examples"
    places = sorted(chosen[:ROWS_SHOWN])
    left = set(range(len(rows))).difference(places)
    examples, work = (sum(rows[i][key] or 0 for i in left) for key in ("examples", "tflops"))
    computed = f" and computed {figure(work)} TFLOP" if tell_work(run) else ""
    return [rows[i] for i in places], (
        f"The {len(places)} clients {which}. The other {len(left):,} have {plural(examples, 'example')} together"
        f"{computed}; all are in result.json, rounds.jsonl and ledger.jsonl."
    )


def result_table(runs: Sequence[Run]) -> Table:
    """The rows of ``result_rows`` as a table that fits a terminal of 80 columns."""
    rows = result_rows(runs)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=note(rows), caption_justify="left")
    for header in ("run", "method"):
        table.add_column(header, overflow="fold")
    for header in ("score", "MB up\n/client", "MB down\n/client", "TFLOP", "seconds"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        costs = [figure(row[key]) for key in ("up_mb", "down_mb", "tflops")]
        cells = [row["run"], row["method"], _score_lines(row), *costs, f"{row['seconds']:,.1f}"]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def score_figure(value: float | None) -> str:
    """A score or loss to three decimals; one for values above 100, three digits of millions, a dash for None."""
    if value is None:
        return "–"
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def figure(value: float | None) -> str:
    """An amount to three significant digits, one decimal from 100 on, at most three below 1; a dash for None."""
    if value is None:
        return "–"
    if 0 < value < 0.001:
        return "<0.001"
    decimals = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}" if value else "0"


def by_client(lines: Sequence[dict[str, Any]]) -> defaultdict[str, list[dict[str, Any]]]:
    """The lines of each client."""
    grouped = defaultdict(list)
    for line in lines:
        grouped[line["client"]].append(line)
    return grouped


def _row(run: Run) -> dict[str, Any]:
    result = run.result
    value, spread = score(run)
    methods = [stage.result["method"] for stage in run.stage_runs]
    return {
        "run": run.name,
        "method": " → ".join(methods),
        "task": result["task"],
        "status": result["status"],
        "headline": result["headline"],
        "score": value,
        "spread": spread,
        "baseline": headline(run, (result.get("baseline") or {}).get("score")),
        "clients": len(run.holders),
        "rounds": sum(stage.result["rounds"] for stage in run.stage_runs),
        "done": sum(len({line["round"] for line in stage.work}) for stage in run.stage_runs),
        "up_mb": _per_client(run, "up"),
        "down_mb": _per_client(run, "down"),
        "setup_mb": _per_client(run, "setup"),
        "total_mb": (result["bytes"]["up"] + result["bytes"]["down"]) / MB,
        "tflops": result["flops"] / TERA if tell_work(run) else None,
        "seconds": result["seconds"],
    }


def _score_lines(row: dict[str, Any]) -> str:
    """The metric above its value, or the status of a run that has none."""
    if row["score"] is None:
        return "no score" if row["status"] == "finished" else str(row["status"])
    tail = "" if row["spread"] is None else f" ± {score_figure(row['spread'])}"
    if row["status"] != "finished":
        tail += f" ({row['status']})"
    always = "" if row["baseline"] is None else f"\nbaseline {score_figure(row['baseline'])}"
    return f"{row['headline']}\n{score_figure(row['score'])}{tail}{always}"


def _per_client(run: Run, key: str) -> float | None:
    """MB per client, summed over the stages, whose clients may differ in number."""
    if not all(stage.clients for stage in run.stage_runs):
        return None
    total: float = sum(stage.result["bytes"][key] / len(stage.clients) for stage in run.stage_runs)
    return total / MB
