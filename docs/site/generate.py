"""Pages of the site that are made from the code: keys of all settings, methods, commands, the Python API.

mkdocs calls these functions while it builds (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from fedstrata.cli import app
from fedstrata.job.tables import Job
from fedstrata.methods import METHODS
from fedstrata.methods.describe import describe
from fedstrata.plan.described import described, toml_value
from fedstrata.sites.settings import ServerSettings, SiteSettings
from fedstrata.sweeps.cells import Sweep

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")
"""A link that leads up from a page's folder."""
PYTHON = """# Python

How to use it, with examples: [From Python](../python.md). Own methods, tasks and codecs: [Add a
method](../guides/add-a-method.md).

## Functions

::: fedstrata
    options:
      members: [run, forecast, sweep, report, audit]
      show_root_heading: false
      show_root_toc_entry: false

## Job and result

::: fedstrata.job.tables.Job

::: fedstrata.runs.result.Result

::: fedstrata.errors.UserError

## Callbacks and events

::: fedstrata.callbacks.Callback

::: fedstrata.events

## Methods and plans

::: fedstrata.plan.plan.Plan

::: fedstrata.plan.plan.Method

::: fedstrata.plan.parts.Part

::: fedstrata.plan.parts.Parts

::: fedstrata.plan.streams.Streams

## Tasks, codecs, aggregates, server optimizers

::: fedstrata.runs.components.Components

::: fedstrata.tasks.task.Task

::: fedstrata.tasks.task.TaskContext

::: fedstrata.tasks.batches.Batch

::: fedstrata.job.task_kinds.TaskKind

::: fedstrata.wire.codec.Codec

::: fedstrata.server.aggregate.Aggregate

::: fedstrata.server.optimizer.ServerOptimizer
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/keys.md": keys_page(),
        "reference/sites.md": sites_page(),
        "reference/methods.md": methods_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": PYTHON,
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name files of the repository, of which the site has no page, instead of linking to them."""
    here = posixpath.dirname(page.file.src_uri)

    def within(link: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(here, link[2])).startswith("..")
        return link[1] if outside else link[0]

    return LINK.sub(within, markdown)


def keys_page() -> str:
    """Every table and key of the job file, from :class:`fedstrata.job.tables.Job`."""
    lines = [
        "# Keys of the job file",
        "",
        "Made from the code. What they are for is explained in [The job file](../job.md).",
    ]
    for name, table in {**tables(Job), "sweep": Sweep}.items():
        if name != "method":
            lines += ["", f"## [{name}]", "", *_rows(table)]
    lines += ["", "## [method]", "", "`name` and the options of that method: [Methods](methods.md)."]
    lines += ["", "## [[stages]]", "", "`name`, `start` (an earlier stage), and any table above but `[sweep]`."]
    return "\n".join(lines) + "\n"


def sites_page() -> str:
    """Every key of ``site.toml`` and ``server.toml``."""
    lines = [
        "# Keys of site.toml and server.toml",
        "",
        "Made from the code. What they are for is explained in [Between sites](../deploy.md). Both files begin",
        "with `format = 2`.",
    ]
    for file, settings in {"site.toml": SiteSettings, "server.toml": ServerSettings}.items():
        inner = tables(settings)
        lines += ["", f"## {file}", "", *_rows(settings, without=inner)]
        for name, table in inner.items():
            lines += ["", f"### {file}: [{name}]", "", *_rows(table)]
    return "\n".join(lines) + "\n"


def tables(settings: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The tables among the fields of some settings."""
    found = {}
    for name, field in settings.model_fields.items():
        for kind in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _rows(table: type[BaseModel], without: Iterable[str] = ()) -> Iterator[str]:
    """A table of its keys: name, type, default, what it is for."""
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for key in described(table):
        if key.name not in without:
            cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.text)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def methods_page() -> str:
    """Every method and its options."""
    lines = ["# Methods", ""]
    for name in METHODS:
        lines += [f"## {name}", "", "```text", *describe(name), "```", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """Every command with its options."""
    command = typer.main.get_command(app)
    return "# Commands\n\n" + "\n".join(_command(command, "fedstrata"))


def _command(command: click.Command, name: str) -> Iterator[str]:
    if command.hidden:
        return
    yield f"## {name}\n\n{(command.help or '').strip()}\n"
    options = [option for option in command.params if not getattr(option, "hidden", False)]
    if options:
        yield "| argument | | default |\n|---|---|---|"
        for option in options:
            words = ", ".join(option.opts) if isinstance(option, click.Option) else option.name or ""
            default = option.default
            shown = "" if default in (None, False) or callable(default) else f"`{toml_value(default)}`"
            help_text = getattr(option, "help", "") or ""
            yield f"| `{words}` | {help_text.replace('|', chr(92) + '|')} | {shown} |"
        yield ""
    for child in getattr(command, "commands", {}).values():
        yield from _command(child, f"{name} {child.name}")
