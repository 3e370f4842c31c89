"""Commands that run jobs and show what came of them: ``run``, ``partition``, ``report``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedstrata.cli.common import Insecure, JobFile, Overrides, note_sweep, resumable, sentences, stop_on_signals
from fedstrata.errors import FULL, UserError, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedstrata.data.prepare import Prepared
    from fedstrata.job.tables import Job


PICTURES = (".png", ".svg", ".pdf")


def run(
    job: JobFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the output folder's run.")] = False,
    engine: Annotated[str | None, typer.Option(help="Where the clients run: inprocess, pool or flower.")] = None,
    federation: Annotated[
        Path | None, typer.Option(help="Folder of a federation, for --engine flower.", show_default=False)
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Run a job: train over its clients, score, save the model and a report; or a sweep of many jobs."""
    with sentences() as console:
        from fedstrata.job.file import load, sweep_table
        from fedstrata.runs.folder import MARKER, check_output_dir

        stop_on_signals()
        keys = {"name": engine, "federation": federation and str(federation), "insecure": insecure or None}
        chosen = [(f"engine.{key}", value) for key, value in keys.items() if value is not None]
        pairs = [*(overrides or ()), *chosen]
        if sweep_table(job)[1]:
            _sweep(console, job, pairs, resume)
            return
        stages = load(job, pairs)  # a mistake in the job file is reported before torch is imported
        with resumable(folder := Path(stages[0].output.dir)):
            if resume and not (folder / MARKER).exists():
                check_output_dir(folder, resume)  # a folder of somebody else's is refused before anything is said
                note = f"note: {folder} holds no run to resume, so it begins with round 1"
                console.print(note, soft_wrap=True)
            _run(console, job, pairs, resume)


def partition(
    job: JobFile,
    overrides: Overrides = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="File for the picture (png, svg or pdf).", show_default="JOB.partition.png, beside JOB"),
    ] = None,
) -> None:
    """Show which client would have which rows, as a table and a picture, without training."""
    with sentences() as console:
        from fedstrata.job.file import load

        stages = load(job, overrides or ())
        if picture is not None and picture.suffix.lower() not in PICTURES:
            raise UserError(f"--picture: {str(picture)!r}; expected a file {', '.join(PICTURES)}")
        if any(stage.between_sites for stage in stages):
            raise UserError("partition: between sites every site has its own rows; there is nothing to partition")
        from fedstrata.data.prepare import data_notes, prepare

        note_sweep(job)
        for stage in stages:
            data = prepare(stage, job.resolve().parent)
            for note in data_notes(stage, data):
                console.print(f"note: {note}", soft_wrap=True)
            suffix = f".{stage.stage}" if stage.stage else ""
            file = picture or job.with_name(f"{job.stem}{suffix}.partition.png")
            if picture and len(stages) > 1:
                file = picture.with_name(f"{picture.stem}{suffix}{picture.suffix}")
            _show_partition(console, stage, data, file)


def split() -> None:
    """The former name of ``partition``."""
    with sentences():
        raise UserError("split: this command is now called fedstrata partition")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of runs, or of a sweep.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the page.", show_default="report.html in the folder; of several runs, in this one"
        ),
    ] = None,
) -> None:
    """Compare runs, or show a sweep: a table here, an offline HTML page."""
    with sentences() as console:
        from fedstrata.reports.report import write_report
        from fedstrata.reports.runs import load_runs
        from fedstrata.reports.sweep_files import is_sweep
        from fedstrata.reports.tables import result_table

        sweeps = [folder for folder in runs if is_sweep(folder)]
        if sweeps and len(runs) > 1:
            raise UserError(
                f"report: {sweeps[0]} is a sweep's folder, which has a page of its own; expected one folder"
            )
        for folder in sweeps:
            _show_sweep(console, folder)
        loaded = [] if sweeps else load_runs(runs)
        if loaded:
            console.print(result_table(loaded))
        console.print(f"report  {write_report(runs, out, loaded)}", soft_wrap=True)
        for folder in sweeps if out is not None else ():
            console.print(f"cells   their pages stay in the sweep: {folder / 'cells'}", soft_wrap=True)


def _run(console: Console, job: Path, pairs: Sequence[str | tuple[str, object]], resume: bool) -> None:
    from fedstrata.cli.progress import Display
    from fedstrata.runs.job import run_job

    with Display(console) as display:
        result = run_job(job, pairs, resume=resume, progress=display)
    from fedstrata.reports.report import write_report
    from fedstrata.reports.runs import load_runs
    from fedstrata.reports.tables import result_table

    runs = load_runs([result.folder])
    page = write_report([result.folder], runs=runs)
    console.print(result_table(runs))
    if result.model_folder is not None and not result.model_folder.exists():
        console.print(f"model   {result.model_folder}: was removed after the run had ended", soft_wrap=True)
    elif result.model_folder is None:
        console.print(f"scored  {result.scored}", soft_wrap=True)
        if result.shared is not None:
            words = "what the clients have in common, no whole model"
            console.print(f"shared  {result.shared}: {words}", soft_wrap=True)
    else:
        console.print(f"model   {result.model_folder}", soft_wrap=True)
    console.print(f"report  {page}", soft_wrap=True)


def _sweep(console: Console, job: Path, pairs: Sequence[str | tuple[str, object]], resume: bool) -> None:
    from fedstrata.sweeps.cells import cells

    folder = cells(job, pairs)[1]  # a mistake in the job file is reported before torch is imported
    from fedstrata.cli.sweep_progress import SweepDisplay
    from fedstrata.sweeps.run import run_sweep

    with resumable(folder), SweepDisplay(console) as display:
        rows = run_sweep(job, pairs, resume=resume, progress=display)
    from fedstrata.reports.report import write_report

    page = write_report([folder])
    _show_sweep(console, folder)
    console.print(f"tables  {folder / 'table'}.md, .csv, .json, .tex; {folder / 'cells.csv'}", soft_wrap=True)
    console.print(f"report  {page}", soft_wrap=True)
    if failed := sorted({f"{row.row}, seed {seed}: {why}" for row in rows for seed, why in row.failed.items()}):
        more = "; …" if len(failed) > 3 else ""
        listed = "; ".join(failed[:3])
        raise UserError(f"{plural(len(failed), 'cell')} failed; --resume tries again: {listed}{more}")


def _show_sweep(console: Console, folder: Path) -> None:
    from fedstrata.reports.sweep_files import read_table
    from fedstrata.reports.sweep_text import note, terminal

    sweep = read_table(folder)
    for table in terminal(sweep.rows):
        console.print(table)
    console.print(note(sweep.rows, sweep.against))


def _show_partition(console: Console, job: Job, data: Prepared, picture: Path) -> None:
    from fedstrata.data.prepare import dropped_rows
    from fedstrata.reports.partition import partition_picture, partition_table
    from fedstrata.reports.partition_plot import STAND_FOR, grouped_words

    if job.stage:
        console.print(f"stage {job.stage}")
    console.print(partition_table(data.shards, data.by))
    if job.task.kind == "tag" or (job.task.kind == "regress" and len(set(data.by or ())) > 1):
        console.print(f"columns: {STAND_FOR[job.task.kind]}")
    own_tests = sum(map(len, data.tests.values())) if data.tests else 0
    unassigned = len(data.train) - sum(map(len, data.shards.values())) - own_tests
    if unassigned:
        console.print(f"{plural(unassigned, 'training row')} assigned to no client")
    test = plural(len(data.test) if data.tests is None else own_tests, "test row")
    source = "" if job.data.test else ", held out of training"
    console.print(f"{test}{source}; {dropped_rows(data)}", soft_wrap=True)
    lacking = _write_picture(partition_picture(data.shards, data.by), picture)
    words = grouped_words(len(data.shards))
    console.print(f"picture {picture}{words and ':'}{words}", soft_wrap=True)
    if lacking:
        console.print("its font lacks letters of some names, which are boxes there; --picture FILE.svg has them")


def _write_picture(figure: Figure, path: Path) -> bool:
    """Write it, and say whether its font lacked letters; those of an SVG are drawn by who shows it."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings(record=True) as lacking:
        warnings.simplefilter("ignore")  # what else matplotlib warns of is no lack of letters
        warnings.filterwarnings("always", r"Glyph \d+")
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            cause = error if error.errno in FULL else None
            if cause:
                path.unlink(missing_ok=True)  # half of it
            raise UserError(f"--picture: {path} cannot be written ({error.strerror})") from cause
    return bool(lacking) and path.suffix.lower() != ".svg"
