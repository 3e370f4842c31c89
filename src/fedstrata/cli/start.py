"""Commands before a first run: ``init``, ``validate``, ``methods``."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.common import (
    JobFile,
    Overrides,
    names_of,
    note_sweep,
    plain_console,
    sentences,
    stop_on_signals,
)
from fedstrata.errors import FULL, UserError

if TYPE_CHECKING:
    from rich.console import Console


def init(
    data: Annotated[
        list[Path],
        typer.Argument(help="A file or folder of rows; or several, one per client.", show_default=False),
    ],
    task: Annotated[str | None, typer.Option(help="Kind of task, instead of the one guessed.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Column of the text; two of them as a,b.")] = None,
    label: Annotated[str | None, typer.Option(help="Column of the label.")] = None,
    test: Annotated[Path | None, typer.Option(help="File of test rows.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model to start from.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients, where the rows do not say.")] = None,
    out: Annotated[Path, typer.Option(help="The job file to write.")] = Path("job.toml"),
) -> None:
    """Look at rows, guess task, columns and clients, and write a job file that runs."""
    with sentences() as console:
        from fedstrata.data.first_job import first_job

        columns = names_of(text)
        if twice := next((name for name in columns if columns.count(name) > 1), None):
            raise UserError(f"--text: names column {twice!r} twice; expected different columns")
        job, lines = first_job(
            data, out, task=task, text=columns, label=label, test=test, model=model, clients=clients
        )
        _write(out, job)
        for line in lines:
            console.print(line, soft_wrap=True)
        console.print(f"job     {out}", soft_wrap=True)
        console.print(f"next    fedstrata validate {shlex.quote(str(out))}", soft_wrap=True)
        console.print(f"        fedstrata run {shlex.quote(str(out))}", soft_wrap=True)


def _write(out: Path, job: str) -> None:
    """Write a new job file, whole or not at all."""
    try:
        content = job.encode()
        with out.open("xb") as file:
            file.write(content)
    except UnicodeEncodeError as error:
        half = job[error.start]
        raise UserError(
            f"{out}: cannot name a file or column with {half!a}, which is no Unicode text; rename it"
        ) from None
    except FileExistsError:
        raise UserError(f"{out}: already exists; name another file with --out") from None
    except OSError as error:
        with suppress(OSError):
            out.unlink()  # a file that was there before is the error above
        cause = error if error.errno in FULL else None
        raise UserError(f"{out}: cannot be written ({error.strerror})") from cause


def validate(job: JobFile, overrides: Overrides = None) -> None:
    """Read and check everything that a run needs, without training: rows, classes, model, plans, costs."""
    with sentences() as console:
        from fedstrata.cli.progress import ForecastDisplay
        from fedstrata.job.file import load, sweep_table
        from fedstrata.sweeps.cells import cells

        stop_on_signals()
        stages = load(job, overrides or ())  # a mistake in the job file is reported before torch is imported
        if sweep_table(job)[1]:
            cells(job, overrides or ())
        note_sweep(job, " but for the keys of its rows")
        with ForecastDisplay(plain_console(stderr=True)) as display:
            from fedstrata.forecasts.validate import validate as check

            checked = check(job, overrides or (), tell=display)
        for line in checked.lines:
            console.print(line, soft_wrap=True)
        _show_costs(console, checked.costs)
        where = stages[0].output.dir
        console.print(f"valid   {job}: nothing was trained; fedstrata run writes to {where}", soft_wrap=True)


def methods(
    name: Annotated[str | None, typer.Argument(help="Method to show.", show_default=False)] = None,
) -> None:
    """List the methods, or show one: its paper and its options."""
    with sentences() as console:
        from fedstrata.methods import METHODS
        from fedstrata.methods.describe import describe, one_line

        if name is None:
            width = max(map(len, METHODS))
            for known, kind in METHODS.items():
                console.print(f"{known:{width}}  {one_line(kind)}", soft_wrap=True)
            console.print("\nfedstrata methods NAME shows the options of one")
            return
        for line in describe(name):
            console.print(line, soft_wrap=True)


def _show_costs(console: Console, costs: dict[str, Any]) -> None:
    from fedstrata.reports.forecast import methods_table, note

    console.print(methods_table(costs))
    console.print(note(costs))
