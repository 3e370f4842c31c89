"""The command line: ``fedstrata run | forecast | split | report | federation | serve | join``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from fedstrata.errors import UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated training of BERT-class models, part by part.",
)
JobFile = Annotated[Path, typer.Argument(help="Job file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the job file to set, such as method.rounds=10."),
]


INSECURE = "Without TLS and keys: for a try on one machine."
federations = typer.Typer(help="Federations between sites.", no_args_is_help=True)
app.add_typer(federations, name="federation")


def main() -> None:
    """Entry point of the ``fedstrata`` command."""
    app()


@app.command()
def run(
    job: JobFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the output folder holds.")] = False,
    engine: Annotated[str | None, typer.Option(help="What carries the exchanges: inprocess or flower.")] = None,
    federation: Annotated[
        Path | None, typer.Option(help="Folder of a federation, for --engine flower.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help=INSECURE)] = False,
) -> None:
    """Run a job: train over its clients, score, save the model and a report; or a sweep of many jobs."""
    with _plainly() as console:
        import fedstrata
        from fedstrata.cli.progress import Display
        from fedstrata.job.file import sweep_table
        from fedstrata.reports.runs import load_run
        from fedstrata.reports.tables import result_table

        signal.signal(signal.SIGTERM, _interrupt)
        keys = {"name": engine, "federation": federation and str(federation), "insecure": insecure or None}
        chosen = [(f"engine.{key}", value) for key, value in keys.items() if value is not None]
        overrides = [*(overrides or ()), *chosen]  # type: ignore[list-item]
        if sweep_table(job)[1]:
            _sweep(console, job, overrides, resume)
            return
        with Display(console) as display:
            result = fedstrata.run(job, overrides, resume=resume, progress=display)
        console.print(result_table([load_run(result.folder)]))
        console.print(f"model   {result.model}\nreport  {result.folder / 'report.html'}", soft_wrap=True)


@app.command()
def forecast(
    job: Annotated[str | None, typer.Argument(help="Job file (TOML); not needed with --model.")] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; its config.json is enough.")] = None,
    task: Annotated[str | None, typer.Option(help="Kind of task, such as mlm or classify.")] = None,
    method: Annotated[str | None, typer.Option(help="Method.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods to compare, a,b,c; the first is 100 %.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the job file, KEY=VALUE.")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Examples per client, if not the job's data.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per example, if not train.max_tokens.")] = None,
    client: Annotated[str | None, typer.Option(help="Whose costs, if not the first client's.")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-9, help="A client's Mbit/s: tells hours.")] = None,
    gflops: Annotated[float | None, typer.Option(min=1e-9, help="A client's 10^9 FLOP/s: tells hours.")] = None,
    units: Annotated[
        str | None, typer.Option(help="Also as a paper prints it: fedbfpt fedbt fedsplitbert fedfreezebert.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what a job will cost one client, in bytes, FLOPs and memory, without running it."""
    with _plainly() as console:
        from fedstrata.forecasts import forecast as forecasting
        from fedstrata.reports.forecast import methods_table, note, rounds_table, split_lines, unit_lines

        words = [*(overrides or ()), *(settings or ())]
        if job is not None and "=" in job and not Path(job).exists():
            words, job = [job, *words], None
        named = {"model.name": model, "task.kind": task, "method.name": method}
        pairs = [(key, value) for key, value in named.items() if value is not None]
        source: Path | dict[str, Any] = Path(job) if job is not None else {"data": {"train": forecasting.NO_DATA}}
        if job is None and model is None:
            raise UserError("forecast: names no job file and no --model; legal: either")
        made = forecasting.forecast(
            source,
            [*pairs, *words],
            methods=[name.strip() for name in methods.split(",")] if methods else (),
            count=examples,
            tokens=tokens,
            client=client,
            bandwidth=bandwidth,
            gflops=gflops,
            units=units,
        )
        if as_json:
            print(json.dumps(made if methods else next(iter(made.values()))))
        elif methods:
            console.print(methods_table(made))
            console.print(note(made))
        else:
            console.print(rounds_table(next(iter(made.values()))))
            console.print(note(made))
        for line in [] if as_json else [*split_lines(made), *unit_lines(made)]:
            console.print(line)


@app.command()
def split(
    job: JobFile,
    overrides: Overrides = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Where to draw the split (png, svg or pdf).", show_default="JOB.split.png"),
    ] = None,
) -> None:
    """Show who would hold which rows, as a table and a picture, without training."""
    with _plainly() as console:
        from fedstrata.data.prepare import prepare
        from fedstrata.job.file import load
        from fedstrata.reports.partition import split_picture, split_table

        jobs = load(job, overrides or ())
        for each in jobs:
            if each.between_sites:
                raise UserError("split: between sites each has its own rows, and nobody divides them")
            data = prepare(each, job.resolve().parent)
            if each.stage:
                console.print(f"stage {each.stage}")
            console.print(split_table(data.shards, data.by))
            if each.task.kind == "regress" and len(set(data.by or ())) > 1:
                console.print("columns: fifths of the numbers, by their median")
            kept = sum(map(len, data.tests.values())) if data.tests else 0
            undealt = len(data.train) - sum(map(len, data.shards.values())) - kept
            if undealt:
                console.print(f"{undealt} training rows belong to no client")
            held = "test rows" if each.data.test else "test rows, held out of training"
            tested = len(data.test) if data.tests is None else sum(map(len, data.tests.values()))
            console.print(f"{tested} {held}; {data.dropped} rows without text or label left out")
            suffix = f".{each.stage}" if each.stage else ""
            target = picture or Path(f"{job.stem}{suffix}.split.png")
            try:
                split_picture(data.shards, data.by).savefig(target, dpi=150)
            except (ValueError, OSError) as error:
                raise UserError(f"--picture: {target} cannot be written ({error})") from None
            console.print(f"picture {target}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Compare runs: one table here, one offline HTML page."""
    with _plainly() as console:
        from fedstrata.reports.page import write_page
        from fedstrata.reports.runs import load_runs
        from fedstrata.reports.sweep import note, read_tables, terminal
        from fedstrata.reports.tables import result_table

        for folder in [folder for folder in runs if (folder / "table.json").exists()]:
            against, entries = read_tables(folder)
            for table in terminal(entries):
                console.print(table)
            console.print(note(entries, against))
            runs = [run for run in runs if run != folder]
        if not runs:
            return
        loaded = load_runs(runs)
        console.print(result_table(loaded))
        try:
            console.print(f"report  {write_page(loaded, out)}", soft_wrap=True)
        except OSError as error:
            raise UserError(f"--out: {out} cannot be written ({error.strerror})") from None


@federations.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.", show_default=False)],
    sites: Annotated[str, typer.Option(help="Names of the sites, a,b,c.", show_default=False)],
    host: Annotated[str, typer.Option(help="Name or address under which sites reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="For Flower.")] = 9440,
    stream_port: Annotated[int, typer.Option(help="For hidden states.")] = 9441,
    ca: Annotated[Path | None, typer.Option(help="Of your own certificate.", show_default=False)] = None,
    certificate: Annotated[Path | None, typer.Option(help="Your own, of the server.", show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key.", show_default=False)] = None,
) -> None:
    """Make a federation: certificates, a key for each site, server.toml, and a folder to hand to each site."""
    with _plainly() as console:
        from fedstrata.sites.provision import init as make

        own = [path for path in (ca, certificate, key) if path is not None]
        if len(own) not in (0, 3):
            raise UserError("federation init: --ca, --certificate and --key go together")
        tls = (own[0], own[1], own[2]) if own else None
        names = [name.strip() for name in sites.split(",") if name.strip()]
        make(folder, names, host=host, port=port, stream_port=stream_port, tls=tls)
        console.print(f"server  {folder / 'server.toml'}", soft_wrap=True)
        for name in names:
            console.print(f"site    {folder / 'sites' / name / 'site.toml'}", soft_wrap=True)


@federations.command()
def add(
    folder: Annotated[Path, typer.Argument(help="Of the federation.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Of the new site.", show_default=False)],
) -> None:
    """Add a site to a federation; the server takes it in when it is started again."""
    with _plainly() as console:
        from fedstrata.sites.provision import add_site

        add_site(folder, name)
        console.print(f"site    {folder / 'sites' / name / 'site.toml'}", soft_wrap=True)


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="Of the federation, or its server.toml.", show_default=False)],
    insecure: Annotated[bool, typer.Option("--insecure", help=INSECURE)] = False,
) -> None:
    """Be the server of a federation: sites connect to it, and runs go through it."""
    with _plainly() as console:
        from fedstrata.sites.serve import serve as go
        from fedstrata.sites.settings import read_server

        go(read_server(folder), lambda line: console.print(line, soft_wrap=True), insecure)


@app.command()
def join(
    settings: Annotated[Path, typer.Argument(help="The site's site.toml.", show_default=False)],
    insecure: Annotated[bool, typer.Option("--insecure", help=INSECURE)] = False,
) -> None:
    """Be a site of a federation: take part in its runs, as site.toml allows."""
    with _plainly() as console:
        from fedstrata.sites.serve import join as go
        from fedstrata.sites.settings import read_site

        go(read_site(settings), lambda line: console.print(line, soft_wrap=True), insecure)


def _sweep(console: Console, job: Path, overrides: Sequence[str], resume: bool) -> None:
    from fedstrata.cli.progress import SweepDisplay
    from fedstrata.reports.sweep import note, terminal
    from fedstrata.sweeps.cells import cells
    from fedstrata.sweeps.run import run_sweep

    sweep, folder, _ = cells(job, overrides)
    with SweepDisplay(console) as display:
        entries = run_sweep(job, overrides, resume=resume, progress=display)
    for table in terminal(entries):
        console.print(table)
    console.print(note(entries, sweep.against))
    console.print(f"tables  {folder / 'table'}.md, .csv, .json, .tex; {folder / 'cells.csv'}", soft_wrap=True)
    console.print(f"report  {folder / 'report.html'}", soft_wrap=True)
    if failed := sorted(
        {f"{entry.row}, seed {seed}: {why}" for entry in entries for seed, why in entry.failed.items()}
    ):
        more = "; …" if len(failed) > 3 else ""
        raise UserError(f"{len(failed)} cells failed; --resume tries them again: {'; '.join(failed[:3])}{more}")


@contextmanager
def _plainly() -> Iterator[Console]:
    """Errors as one sentence and an exit code: 2 what the user can mend, 130 stopped, 1 the machine's fault."""
    console = Console(highlight=False)
    try:
        yield console
    except UserError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("stopped; the same command with --resume goes on from the last finished round", 130)
    except OSError as error:
        _fail(f"{error.filename or 'the machine'}: {error.strerror or error}", 1)


def _fail(sentence: str, code: int) -> None:
    print(f"fedstrata: {sentence}", file=sys.stderr)
    raise typer.Exit(code)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
