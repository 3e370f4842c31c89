"""The command ``demo``: the same classifier, trained over six hospitals in two ways, in one table and one page.

``examples/demo_rates.py`` chose the learning rates of each on development rows (docs/results/demo.md).
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.common import Overrides, sentences, stop_on_signals
from fedstrata.errors import UserError
from fedstrata.plan.kinds import LOCK
from fedstrata.wire.files import locked

if TYPE_CHECKING:
    from rich.console import Console

JOB = Path(__file__).with_suffix(".toml")
"""FedBFPT, then FedBT."""
PAGE = "report.html"
VARIANTS: dict[str, dict[str, Any]] = {
    "fedbfpt-fedbt": {},
    "fedavg-fedavg": {
        "pretrain.method.name": "fedavg",
        "pretrain.train.learning_rate": 3e-5,
        "finetune.method.name": "fedavg",
        "finetune.train.learning_rate": 5e-4,
    },
}
"""Variant -> keys over the job."""


def demo(
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/demo"),
) -> None:
    """Try it: six hospitals train one model in two ways, on this machine. Needs the extra demo."""
    with sentences() as console:
        stop_on_signals()
        if any(word.startswith("output.dir=") for word in overrides or ()):
            raise UserError("demo: output.dir=... is not taken; name the folder with --output")
        from fedstrata.data.demo import MODEL, TEXT

        for package in (TEXT, MODEL):
            package.path()  # not installed: said before torch is imported and before anything is written
        from fedstrata.job.file import load

        job = tomllib.loads(JOB.read_text(encoding="utf-8"))
        variants = {
            name: [*changes.items(), *(overrides or ()), ("output.dir", str(output / name))]
            for name, changes in VARIANTS.items()
        }
        for pairs in variants.values():
            load(job, pairs)
        _clear(output)
        from fedstrata.cli.progress import Display
        from fedstrata.runs.job import run_job

        with Display(console) as display:
            for name, pairs in variants.items():
                console.print(f"\n{name}", style="bold")
                run_job(job, pairs, progress=display)
        _compare(console, output)


def _compare(console: Console, output: Path) -> None:
    """Show both runs in one table, write their page, and the job beside it."""
    from fedstrata.reports.page import write_page
    from fedstrata.reports.runs import load_run
    from fedstrata.reports.tables import result_table

    runs = [load_run(output / name) for name in VARIANTS]
    console.print(result_table(runs))
    shutil.copyfile(JOB, output / JOB.name)
    console.print(f"job     {output / JOB.name}", soft_wrap=True)
    console.print(f"report  {write_page(runs, output / PAGE)}", soft_wrap=True)


def _clear(output: Path) -> None:
    """Remove the runs of an earlier demo; nothing else is touched.

    Raises:
        UserError: where a run, the page or the job is to go, there is something else, in a run's folder too, or a
            demo runs there.
    """
    from fedstrata.reports.page import is_foreign
    from fedstrata.runs.folder import MARKER, somebodys_file

    folders, page, job = [output / name for name in VARIANTS], output / PAGE, output / JOB.name
    foreign = [folder for folder in folders if folder.exists() and not (folder / MARKER).exists()]
    foreign += filter(None, map(somebodys_file, folders))
    foreign += [page] if is_foreign(page) else []
    foreign += [job] if job.exists() and job.read_bytes()[:100] != JOB.read_bytes()[:100] else []
    if foreign:
        raise UserError(f"demo: {foreign[0]} was not written by FedStrata; name another folder with --output")
    if busy := [folder for folder in folders if locked(folder / LOCK)]:
        raise UserError(f"demo: another process is running in {busy[0]}; name another folder with --output")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
