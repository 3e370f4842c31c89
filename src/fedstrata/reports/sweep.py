"""The rows of a sweep's table: what its runs came to, over the seeds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from fedstrata.cost.target import reached
from fedstrata.reports.runs import Run, load_run, upto
from fedstrata.reports.tables import MB, result_rows

FAILED = "failed.txt"
"""In the folder of a cell that failed: why."""
ROUNDING = 1e-12
"""Share of the largest score by which equal differences of scores may differ."""


class SweepCell(Protocol):
    """One run of a sweep, as far as its table is concerned."""

    @property
    def row(self) -> str:
        """The row that it belongs to."""

    @property
    def base(self) -> str | None:
        """The row that this one is compared with."""

    @property
    def seed(self) -> int:
        """Its seed."""

    @property
    def folder(self) -> Path:
        """Its output folder."""

    @property
    def stages(self) -> Mapping[str, str]:
        """Stage -> a hash of what decides its result."""

    @property
    def target(self) -> float | None:
        """The score to which rounds and bytes are counted."""


@dataclass(frozen=True)
class SweepRow:
    """One row of a sweep's table, in one stage.

    Attributes:
        row: the row's name.
        stage: the stage's name; empty for a job of one stage.
        method: its method, after those of the stages it starts from.
        metric: the headline.
        seeds: those that finished; of several whose stage is one and the same run, the first.
        scores: the headline score of each of them.
        mean: of the scores; None where nothing finished.
        sd: sample standard deviation of the scores; None with fewer than two.
        p: of a paired t-test of the scores with those of the row compared against; None where there is none.
        p_holm: the same, corrected for all comparisons of the stage (:func:`holm`).
        up_mb: MB sent per client; this and the costs below are means over the seeds, of the stage and of those it
            starts from.
        down_mb: MB received per client, without the initial download.
        setup_mb: MB of initial download per client.
        tflops: 10^12 FLOPs of all clients' training.
        seconds: wall time.
        metrics: every metric -> its value for each seed.
        failed: seed -> why it has no score.
        target: the score to which the following are counted; None where none is set.
        reached: number of seeds that reached it.
        rounds_to_target: mean rounds until they first did, of the stage alone.
        mb_to_target: mean MB per client, sent and received, until then.
        baseline: the headline score of always predicting the most frequent class, or the mean, over the seeds;
            None for a task without labels.
        base: the row that it is compared with; None where there is none.
        epsilon: what the stage by itself lets through of the client that it protects least, the largest over the
            seeds; None without noise.
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
    p_holm: float | None = None
    baseline: float | None = None
    base: str | None = None
    epsilon: float | None = None


def sweep_rows(cells: Sequence[SweepCell]) -> list[SweepRow]:
    """The table's rows from what the cells have on disk, stage by stage."""
    runs = {(cell.row, cell.seed): finished(cell.folder) for cell in cells}
    failed = {(cell.row, cell.seed): _why(cell.folder) for cell in cells if runs[cell.row, cell.seed] is None}
    targets = {cell.row: cell.target for cell in cells}
    names = dict.fromkeys(stage.result["stage"] for run in runs.values() if run for stage in run.stage_runs)
    stages = list(names) or [""]
    table: list[SweepRow] = []
    for stage in stages:
        by_row = {cell.row: _by_seed([one for one in cells if one.row == cell.row], runs, stage) for cell in cells}
        for name, base in {cell.row: cell.base for cell in cells}.items():
            why = {seed: reason for (other, seed), reason in failed.items() if other == name}
            row = replace(_row(name, stage, by_row[name], why, by_row[base] if base else {}), base=base)
            target = targets[name] if stage == stages[-1] else None
            table.append(row if target is None else replace(row, **_to_target(target, by_row[name])))
    return [row for stage in stages for row in _corrected([row for row in table if row.stage == stage])]


def _by_seed(cells: Sequence[SweepCell], runs: Mapping[tuple[str, int], Run | None], stage: str) -> dict[int, Run]:
    """One row's runs up to a stage; a stage that the seeds do not change has run once."""
    found: dict[str, tuple[int, Run]] = {}
    for cell in cells:
        run = runs[cell.row, cell.seed]
        if run and (part := upto(run, stage)):
            found.setdefault(cell.stages[stage], (cell.seed, part))
    return dict(found.values())


def finished(folder: Path) -> Run | None:
    """The run in a cell's folder; None while it is not finished, or has failed to get more rounds."""
    there = (folder / "result.json").exists() and not (folder / FAILED).exists()
    run = load_run(folder) if there else None
    return run if run and run.result["status"] == "finished" else None


def paired(scores: Sequence[float], base: Sequence[float]) -> float | None:
    """p of a two-sided paired t-test; None with fewer than two pairs or where all differences are the same.

    Differences such as 0.9 - 0.8 and 0.8 - 0.7 are the same, though their last bits are not.
    """
    differences = [score - other for score, other in zip(scores, base, strict=True)]
    rounding = ROUNDING * max(map(abs, [*scores, *base]), default=0.0)
    if len(differences) < 2 or max(differences) - min(differences) <= rounding:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal differences: still a p
        from scipy.stats import ttest_rel  # here: slow to load

        return float(ttest_rel(scores, base).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """p-values of several tests, corrected so that a false positive among all of them is as rare as in one.

    Holm. A simple sequentially rejective multiple test procedure. Scandinavian Journal of Statistics 6(2), 1979.
    """
    corrected, least = [0.0] * len(values), 0.0
    for done, place in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        least = corrected[place] = min(1.0, max(least, (len(values) - done) * values[place]))
    return corrected


def _corrected(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """One stage's rows with the corrected p of those that are compared."""
    known = iter(holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else replace(row, p_holm=next(known)) for row in rows]


def _row(
    name: str, stage: str, runs: Mapping[int, Run], failed: Mapping[int, str], against: Mapping[int, Run]
) -> SweepRow:
    scores = _scores(runs)
    empty: dict[str, Any] = {"headline": "", "score": {}}
    first = next((run.result for run in runs.values()), empty)
    costs = result_rows(list(runs.values()))
    alike = {seed: run for seed, run in against.items() if run.result["headline"] == first["headline"]}
    base = _scores(alike)  # no test of an accuracy with an F1
    both = [seed for seed in scores if seed in base]
    values = list(scores.values())
    return SweepRow(
        row=name,
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
            metric: tuple(run.result["score"][metric] for run in runs.values())
            for metric in first["score"]
            if all(metric in run.result["score"] for run in runs.values())
        },
        failed=dict(failed),
        baseline=_mean(line["baseline"] for line in costs),
        epsilon=max((spent for run in runs.values() if (spent := _epsilon(run)) is not None), default=None),
    )


def _epsilon(run: Run) -> float | None:
    """What the last stage of a run has let through; None without noise."""
    privacy: Mapping[str, float] = run.stage_runs[-1].result.get("privacy") or {}
    return privacy.get("epsilon")


def _to_target(target: float, runs: Mapping[int, Run]) -> dict[str, Any]:
    """The last fields of a :class:`SweepRow`."""
    costs = []
    for run in runs.values():
        last = run.stage_runs[-1]
        if first := reached(target, last.result["headline"], last.rounds, last.ledger):
            costs.append((first.rounds, sum(first.bytes.values()) / len(last.clients) / MB))
    return {
        "target": target,
        "reached": len(costs),
        "rounds_to_target": _mean(rounds for rounds, _ in costs),
        "mb_to_target": _mean(mb for _, mb in costs),
    }


def _scores(runs: Mapping[int, Run]) -> dict[int, float]:
    scores = {seed: result_rows([run])[0]["score"] for seed, run in runs.items()}
    return {seed: score for seed, score in scores.items() if score is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _why(folder: Path) -> str:
    path = folder / FAILED
    return path.read_text(encoding="utf-8").strip() if path.exists() else "not run"
