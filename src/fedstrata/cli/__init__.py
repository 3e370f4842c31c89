"""The command line: ``fedstrata init | validate | run | forecast | audit | partition | report | …``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import click
import typer

from fedstrata.cli import handover, jobs, sites, start
from fedstrata.cli.audit import audit
from fedstrata.cli.demo import demo
from fedstrata.cli.forecast import forecast

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,  # click does
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
site_commands = typer.Typer(help="Show what a site has recorded.", no_args_is_help=True, suggest_commands=False)
federations = typer.Typer(help="Create and watch a federation.", no_args_is_help=True, suggest_commands=False)


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command in ``words``, by default in those of the command line; a misspelled one is one sentence."""
    try:
        code = app(words, prog_name="fedstrata", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        print(f"fedstrata: {_in_one_sentence(error)}", file=sys.stderr)
        code = error.exit_code
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends what is left without a traceback
    sys.exit(code)


def _in_one_sentence(error: click.ClickException) -> str:
    """What click says about a mistyped command or option, and where to read more."""
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "fedstrata"
    said = " ".join(error.format_message().split()).rstrip(".").replace(". Did you mean", "; did you mean")
    more = "" if said.endswith("?") else f"; see {command} --help"
    return f"{said[0].lower()}{said[1:]}{more}"


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


app.command()(demo)
app.command()(start.init)
app.command()(start.validate)
app.command()(jobs.run)
app.command()(forecast)
app.command()(audit)
app.command()(jobs.partition)
app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(jobs.split)
app.command()(jobs.report)
app.command()(start.methods)
app.command()(handover.export)
app.command()(handover.push)
app.add_typer(federations, name="federation")
federations.command()(sites.init)
federations.command()(sites.add)
federations.command()(sites.renew)
federations.command()(sites.status)
app.command()(sites.serve)
app.command()(sites.join)
app.add_typer(site_commands, name="site")
site_commands.command()(sites.log)
