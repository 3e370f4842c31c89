"""The command ``audit``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedstrata.cli.common import (
    JobFile,
    Overrides,
    names_of,
    note_sweep,
    plain_console,
    print_json,
    sentences,
    stop_on_signals,
)

if TYPE_CHECKING:
    from fedstrata.job.tables import Job


Client = Annotated[
    str | None, typer.Option(help="Client whose round is simulated, instead of the first.", show_default=False)
]
Attacks = Annotated[
    list[str] | None, typer.Option(help="Attacks, a,b,c, instead of all that fit.", show_default=False)
]
Public = Annotated[
    str | None,
    typer.Option(
        help="File with public text, instead of the documentation that comes with Python.", show_default=False
    ),
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Also attack the final model, and short trainings with texts put in on purpose."),
]


def audit(
    job: JobFile,
    overrides: Overrides = None,
    client: Client = None,
    attacks: Attacks = None,
    public: Public = None,
    deep: Deep = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what the server can read from what one client sends: simulate its first round, and attack that."""
    with sentences() as console:
        from fedstrata.job.file import load

        stop_on_signals()
        stages = load(job, overrides or ())  # a mistake in the job file is reported before torch is imported
        note_sweep(job)
        from fedstrata.audits.options import ATTACKS, AuditOptions

        names = names_of(attacks) if attacks else ATTACKS
        AuditOptions(client, names, public)  # so is one in the options
        from fedstrata.cli.progress import Display

        with Display(plain_console(stderr=True)) as display:
            from fedstrata.audits.audit import audit as play

            record = play(job, overrides or (), AuditOptions(client, names, public, display, deep))
        report = _report(Path(stages[0].output.dir))
        if as_json:
            print_json(record)
        else:
            _show(console, stages, record, report)


def _report(folder: Path) -> Path | None:
    """The page of the folder's run, written anew; None where it has none."""
    if not (folder / "result.json").exists():
        return None
    from fedstrata.reports.report import write_report

    return write_report([folder])


def _show(console: Console, stages: list[Job], record: dict[str, Any], report: Path | None) -> None:
    from fedstrata.plan.kinds import AUDIT
    from fedstrata.reports.audit import audit_lines, audit_table

    for stage in record["stages"]:
        if stage["findings"]:
            console.print(audit_table(stage))
        for line in audit_lines(stage):
            console.print(line, soft_wrap=True)
    console.print(f"audit   {Path(stages[0].output.dir) / AUDIT}", soft_wrap=True)
    if report is not None:
        console.print(f"report  {report}", soft_wrap=True)
