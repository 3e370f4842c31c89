"""The command ``forecast``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedstrata.cli.common import (
    Overrides,
    names_of,
    note_sweep,
    plain_console,
    print_json,
    sentences,
    stop_on_signals,
)
from fedstrata.errors import UserError


def forecast(  # noqa: PLR0913  # the command's options
    job: Annotated[str | None, typer.Argument(help="Job file (TOML); not needed with --model.")] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; its config.json is enough.")] = None,
    task: Annotated[str | None, typer.Option(help="Kind of task, such as mlm or classify.")] = None,
    method: Annotated[str | None, typer.Option(help="Method, such as fedbfpt.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Methods to compare, a,b,c; the first is 100 %.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the job file, KEY=VALUE.")] = None,
    examples: Annotated[int | None, typer.Option(help="Examples per client, instead of the job's data.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per example, instead of train.max_tokens.")] = None,
    client: Annotated[str | None, typer.Option(help="Client whose costs to show, instead of the first.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Client bandwidth in Mbit/s; adds estimated hours.")
    ] = None,
    gflops: Annotated[float | None, typer.Option(help="Client speed in GFLOP/s; adds estimated hours.")] = None,
    units: Annotated[
        str | None,
        typer.Option(help="Also in the units of a paper: fedbfpt, fedbt, fedsplitbert or fedfreezebert."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate what a job will cost one client, in bytes, FLOPs and memory, without running it."""
    with sentences() as console:
        stop_on_signals()
        pairs: list[Any] = [*(overrides or ()), *(settings or ())]
        if job is not None and "=" in job and not Path(job).exists():
            pairs, job = [job, *pairs], None
        chosen = {"model.name": model, "task.kind": task, "method.name": method}
        pairs = [*((key, value) for key, value in chosen.items() if value is not None), *pairs]
        names = names_of(methods)
        if methods and not names:
            raise UserError("forecast: --methods names no method; expected names, such as fedavg,fedbfpt")
        source = _model_alone(model, pairs, names) if job is None else Path(job)
        _check(source, pairs, names)
        if isinstance(source, Path):
            note_sweep(source)
        from fedstrata.cli.progress import ForecastDisplay
        from fedstrata.forecasts.options import ForecastOptions

        with ForecastDisplay(plain_console(stderr=True)) as display:
            options = ForecastOptions(names, examples, tokens, client, bandwidth, gflops, units, tell=display)
            from fedstrata.forecasts.forecast import forecast as compute

            costs = compute(source, pairs, options)
        if as_json:
            print_json(costs if methods else next(iter(costs.values())))
        else:
            _show(console, costs, compare=bool(methods))


def _model_alone(model: str | None, pairs: Sequence[Any], methods: Sequence[str]) -> dict[str, Any]:
    """A job of a model alone, without data.

    Raises:
        UserError: nothing says which model, task or method.
    """
    from fedstrata.data.prepare import NO_DATA
    from fedstrata.job.file import pairs_of

    if model is None:
        raise UserError("forecast: expected a job file or --model")
    said = {"method.name"} if methods else set[str]()
    said |= {key for key, _ in pairs_of(pairs)}
    for key, option in (("task.kind", "--task mlm"), ("method.name", "--method fedbfpt")):
        if key not in said:
            raise UserError(
                f"forecast: [{key.partition('.')[0]}] is missing; with --model expected {option}, for one"
            )
    return {"data": {"train": NO_DATA}}


def _check(source: Path | dict[str, Any], pairs: Sequence[Any], methods: Sequence[str]) -> None:
    """Report a mistake in the job file before torch is imported."""
    from fedstrata.job.file import load

    for method in [[("method.name", name)] for name in methods] or [[]]:
        load(source, [*pairs, *method])


def _show(console: Console, costs: dict[str, dict[str, Any]], compare: bool) -> None:
    from fedstrata.reports.forecast import (
        late_lines,
        methods_table,
        note,
        readable_lines,
        rounds_table,
        split_lines,
        sum_lines,
        unit_lines,
    )
    from fedstrata.reports.privacy import privacy_lines

    console.print(methods_table(costs) if compare else rounds_table(next(iter(costs.values()))))
    console.print(note(costs))
    promised = [
        f"{name}: {line}" if len(costs) > 1 else line
        for name, own in costs.items()
        for line in privacy_lines(own["privacy"])
    ]
    told = [*split_lines(costs), *sum_lines(costs), *late_lines(costs), *unit_lines(costs)]
    for line in [*told, *promised, *readable_lines(costs)]:
        console.print(line)
