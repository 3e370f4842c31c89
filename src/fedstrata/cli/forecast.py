"""The command ``forecast``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedstrata.cli.common import Overrides, sentences
from fedstrata.errors import UserError


def forecast(  # noqa: PLR0913  # the command's options
    job: Annotated[str | None, typer.Argument(help="Job file (TOML); not needed with --model.")] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; its config.json is enough.")] = None,
    task: Annotated[str | None, typer.Option(help="Kind of task, such as mlm or classify.")] = None,
    method: Annotated[str | None, typer.Option(help="Method, such as fedbfpt.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods to compare, a,b,c; the first is 100 %.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the job file, KEY=VALUE.")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Examples per client, instead of the job's data.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per example, instead of train.max_tokens.")
    ] = None,
    client: Annotated[str | None, typer.Option(help="Client whose costs to show, instead of the first.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1e-9, help="Client bandwidth in Mbit/s; adds estimated hours.")
    ] = None,
    gflops: Annotated[
        float | None, typer.Option(min=1e-9, help="Client speed in GFLOP/s; adds estimated hours.")
    ] = None,
    units: Annotated[
        str | None,
        typer.Option(help="Also in the units of a paper: fedbfpt, fedbt, fedsplitbert or fedfreezebert."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate what a job will cost one client, in bytes, FLOPs and memory, without running it."""
    with sentences() as console:
        pairs: list[Any] = [*(overrides or ()), *(settings or ())]
        if job is not None and "=" in job and not Path(job).exists():
            pairs, job = [job, *pairs], None
        if job is None and model is None:
            raise UserError("forecast: names no job file and no --model; expected one of them")
        chosen = {"model.name": model, "task.kind": task, "method.name": method}
        pairs = [*((key, value) for key, value in chosen.items() if value is not None), *pairs]
        names = [name.strip() for name in methods.split(",")] if methods else []
        source = _no_data() if job is None else Path(job)
        _check(source, pairs, names)
        from fedstrata.forecasts.forecast import ForecastOptions
        from fedstrata.forecasts.forecast import forecast as compute

        options = ForecastOptions(names, examples, tokens, client, bandwidth, gflops, units)
        costs = compute(source, pairs, options)
        if as_json:
            print(json.dumps(costs if methods else next(iter(costs.values()))))
        else:
            _show(console, costs, compare=methods is not None)


def _no_data() -> dict[str, Any]:
    """A job of a model alone."""
    from fedstrata.data.prepare import NO_DATA

    return {"data": {"train": NO_DATA}}


def _check(source: Path | dict[str, Any], pairs: Sequence[Any], methods: Sequence[str]) -> None:
    """Report a mistake in the job file before torch is imported."""
    from fedstrata.job.file import load

    for method in [[("method.name", name)] for name in methods] or [[]]:
        load(source, [*pairs, *method])


def _show(console: Console, costs: dict[str, dict[str, Any]], compare: bool) -> None:
    from fedstrata.reports.forecast import methods_table, note, rounds_table, split_lines, unit_lines

    console.print(methods_table(costs) if compare else rounds_table(next(iter(costs.values()))))
    console.print(note(costs), markup=False)  # a sentence about [clients] is no markup
    for line in [*split_lines(costs), *unit_lines(costs)]:
        console.print(line)
