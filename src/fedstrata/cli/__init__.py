"""The command line: ``fedstrata run | forecast | partition | report | federation | serve | join``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from fedstrata.cli import jobs, sites
from fedstrata.cli.forecast import forecast

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
federations = typer.Typer(help="Federations between sites.", no_args_is_help=True)


def main() -> None:
    """Entry point of the ``fedstrata`` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedstrata {version('fedstrata')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated training of BERT-class models, part by part."""


app.command()(jobs.run)
app.command()(forecast)
app.command()(jobs.partition)
app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(jobs.split)
app.command()(jobs.report)
app.add_typer(federations, name="federation")
federations.command()(sites.init)
federations.command()(sites.add)
app.command()(sites.serve)
app.command()(sites.join)
