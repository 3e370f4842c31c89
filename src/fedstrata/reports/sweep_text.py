"""The table of a sweep for the terminal, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import fmean

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.errors import four_decimals
from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.reports.downloads import csv_text, tex
from fedstrata.reports.sweep import ROUNDING, SweepRow
from fedstrata.reports.tables import figure
from fedstrata.wire.foreign import plain_text

NOTE = (
    "Score: mean ± standard deviation over the seeds; p (Holm): paired t-test over the seeds{against}, "
    "corrected for all comparisons of the table by Holm's method. "
    "MB = 1 000 000 bytes per client over all rounds, without the initial download; TFLOP: training work of all "
    "clients, counted; seconds: wall time. Costs are means over the seeds, including the stages a stage builds on."
)
TARGETS = (
    " To target: rounds, and MB per client both ways, until the score of output.target was first reached, of the "
    "stage alone; means over the seeds that reached it."
)
EPSILON = (
    " Epsilon: of the stage alone, for the client that is protected least, the largest over the seeds; against "
    "whom it holds is on each run's page."
)
COSTS = {"up_mb": "MB up", "down_mb": "MB down", "tflops": "TFLOP", "seconds": "seconds"}
"""Field of a row -> the head of its column."""


def note(rows: Sequence[SweepRow], against: str | None) -> str:
    """What the table's columns say."""
    targets = TARGETS if any(row.target is not None for row in rows) else ""
    noise = EPSILON if any(row.epsilon is not None for row in rows) else ""
    compared = f" with {against!r}" if against else ""
    return NOTE.format(against=compared) + targets + noise + "".join(_baselines(rows))


def _baselines(rows: Sequence[SweepRow]) -> Iterable[str]:
    """Of each stage the score of a prediction that is always the same, and the rows that are not better."""
    for stage, lines in by_stage(rows):
        known = [row for row in lines if row.baseline is not None and row.mean is not None]
        if not known:
            continue
        values = list(dict.fromkeys(four_decimals(value) for value in sorted(row.baseline or 0 for row in known)))
        found = values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"
        yield f" Baseline{f' of {stage}' if stage else ''}, always the most frequent class or the mean: {found}"
        sign = {row.row: -1 if row.metric in LOWER_IS_BETTER else 1 for row in known}
        lost = [row.row for row in known if sign[row.row] * (row.mean or 0) <= sign[row.row] * (row.baseline or 0)]
        yield f"; not better than that: {', '.join(lost)}." if lost else "."


def terminal(rows: Sequence[SweepRow]) -> Iterable[Table]:
    """A table per stage for 80 columns; for each column of targets and epsilon one of costs gives way."""
    for stage, lines in by_stage(rows):
        metric = _metric(lines)
        title = f"{stage}: {metric}" if stage else metric
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
        table.add_column("row", overflow="fold")
        heads = ["row", "score", *column_heads(lines)[2:]]
        more = heads[len(COSTS) + 3 :]
        hidden = [COSTS[key] for key in ("tflops", "seconds", "down_mb")[: len(more)]]
        shown = [i for i, head in enumerate(heads) if head not in hidden]
        for i in shown[1:]:
            table.add_column(heads[i].replace(" to ", "\nto ").replace(" (", "\n("), justify="right", no_wrap=True)
        for cells in table_cells(lines):
            cells[1] = re.sub(r"^([a-z]\w*) ", r"\1\n", cells[1])
            cells[len(COSTS) + 3 :] = [cell.replace(" (", "\n(") for cell in cells[len(COSTS) + 3 :]]
            table.add_row(*(Text(cells[i]) for i in shown))
        yield table


def markdown(rows: Sequence[SweepRow], against: str | None) -> str:
    """The table in Markdown, a section per stage."""
    blocks = []
    for stage, lines in by_stage(rows):
        heads = column_heads(lines)
        blocks.append(f"### {stage}\n" if stage else "")
        blocks.append("| " + " | ".join(heads) + " |\n|---|" + "---:|" * (len(heads) - 1))
        for cells in table_cells(lines):
            name, *figures = cells
            blocks.append("| " + " | ".join([_plain(name).replace("|", "\\|"), *figures]) + " |")
        blocks.append("")
    return "\n".join([*blocks, _plain(note(rows, against)), ""]).lstrip()


def _plain(text: str) -> str:
    """A text on one line and without tags; names of rows may hold anything."""
    return plain_text(text, len(text))


def latex(rows: Sequence[SweepRow], against: str | None) -> str:
    """The table in LaTeX (package booktabs), a tabular per stage."""
    blocks = []
    for stage, lines in by_stage(rows):
        heads = column_heads(lines)
        body = [" & ".join(map(tex, cells)) + r" \\" for cells in (heads, *table_cells(lines))]
        blocks += [f"% stage {stage}"] if stage else []
        blocks += [r"\begin{tabular}{l" + "r" * (len(heads) - 1) + "}", r"\toprule", body[0], r"\midrule"]
        blocks += [*body[1:], r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([*blocks, f"% {_plain(note(rows, against))}", ""])


def rows_csv(rows: Sequence[SweepRow]) -> str:
    """A line per row and stage, without the values of each seed, which :func:`cells_csv` has."""
    lines = []
    for row in rows:
        fields = {key: value for key, value in asdict(row).items() if key not in ("metrics", "failed", "scores")}
        lines.append({**fields, "seeds": len(row.seeds), "failed": len(row.failed)})
    return csv_text(lines)


def cells_csv(rows: Sequence[SweepRow]) -> str:
    """A line per row, stage, seed and metric."""
    return csv_text(
        [
            {"row": row.row, "stage": row.stage, "seed": seed, "metric": name, "value": value}
            for row in rows
            for name, values in row.metrics.items()
            for seed, value in zip(row.seeds, values, strict=True)
        ]
    )


def by_stage(rows: Sequence[SweepRow]) -> Iterable[tuple[str, list[SweepRow]]]:
    """Each stage with its rows."""
    for stage in dict.fromkeys(row.stage for row in rows):
        yield stage, [row for row in rows if row.stage == stage]


def column_heads(rows: Sequence[SweepRow]) -> list[str]:
    """The heads of one stage's table."""
    targets = ["rounds to target", "MB to target"] if any(row.target is not None for row in rows) else []
    noise = ["epsilon"] if any(row.epsilon is not None for row in rows) else []
    return ["row", _metric(rows), "p (Holm)", *COSTS.values(), *targets, *noise]


def table_cells(rows: Sequence[SweepRow]) -> list[list[str]]:
    """The cells of each row, as many as :func:`column_heads`."""
    heads = column_heads(rows)
    mixed = _metric(rows) == "score"
    lines = []
    for row in rows:
        p = "" if row.p_holm is None else _three_decimals(row.p_holm)
        cells = [row.row, _score(row, mixed), p, *(figure(getattr(row, key)) for key in COSTS)]
        if row.target is not None:
            some = f" ({row.reached} of {len(row.seeds)})" if 0 < row.reached < len(row.seeds) else ""
            cells += [f"{figure(row.rounds_to_target)}{some}", figure(row.mb_to_target)]
        cells += [""] * (len(heads) - len(cells))
        if heads[-1] == "epsilon" and row.scores:
            cells[-1] = "none" if row.epsilon is None else f"{row.epsilon:.3g}"
        lines.append(cells)
    return lines


def _score(row: SweepRow, mixed: bool) -> str:
    """Mean and deviation; the metric before them where rows differ in it; how many seeds if some failed."""
    score = "–" if row.mean is None else four_decimals(row.mean)
    score += "" if row.sd is None else f" ± {four_decimals(row.sd)}"
    score = f"{row.metric} {score}" if mixed and row.mean is not None else score
    if row.failed:
        score += f" ({len(row.seeds)} of {len(row.seeds) + len(row.failed)})"
    return score


def _metric(rows: Sequence[SweepRow]) -> str:
    """The metric of all rows; where they differ each score has its own before it."""
    metrics = {row.metric for row in rows if row.metric}
    return metrics.pop() if len(metrics) == 1 else "score"


def verdicts(rows: Sequence[SweepRow]) -> list[str]:
    """How each row of a stage stands to the one compared with: score, over the seeds of both, and bytes."""
    named, sentences = {row.row: row for row in rows}, []
    for row in rows:
        base = named.get(row.base or "")
        theirs = dict(zip(base.seeds, base.scores, strict=True)) if base and base.metric == row.metric else {}
        pairs = [(mine, theirs[seed]) for seed, mine in zip(row.seeds, row.scores, strict=True) if seed in theirs]
        if not base or not pairs or row.mean is None:
            continue
        sign = -1 if row.metric in LOWER_IS_BETTER else 1
        gap = sign * fmean(mine - other for mine, other in pairs)
        same = abs(gap) <= ROUNDING * max(map(abs, chain(*pairs)))
        how = "the same as" if same else f"{four_decimals(abs(gap))} {'better' if gap > 0 else 'worse'} than"
        share = f", with {row.up_mb / base.up_mb:.1%} of its MB up" if row.up_mb is not None and base.up_mb else ""
        sure = _sure(row.p_holm, len(pairs))
        sentences.append(f"{row.row}: {row.metric} {four_decimals(row.mean)}, {how} {base.row}{share}; {sure}.")
    return sentences


def _sure(p: float | None, seeds: int) -> str:
    """What a comparison over the seeds that both rows finished says of chance."""
    if p is None:
        return "one seed says nothing of chance" if seeds < 2 else "no test is possible"
    if p < 0.05:
        return f"more than chance over {seeds} seeds (p {_three_decimals(p)}, Holm)"
    return f"not told apart from chance by {seeds} seeds (p {_three_decimals(p)}), no proof of equality"


def _three_decimals(p: float) -> str:
    """A p, which is never 0."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"
