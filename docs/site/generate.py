"""Pages of the site that are made from the code: keys of the job file, methods, commands, the Python API.

mkdocs calls these functions while it builds (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
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

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")
"""A link that leads up from a page's folder."""
PYTHON = """# Python

::: fedstrata
    options:
      members: [run, sweep, forecast, report]
      show_root_heading: false

::: fedstrata.runs.result.Result

::: fedstrata.callbacks.Callback

::: fedstrata.events

::: fedstrata.plan.plan.Plan

::: fedstrata.plan.plan.Method
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/keys.md": keys_page(),
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
    for name, field in Job.model_fields.items():
        kind = field.annotation
        tables = [one for one in getattr(kind, "__args__", (kind,)) if isinstance(one, type)]
        table = next((one for one in tables if issubclass(one, BaseModel)), None)
        if table is None or name == "method":
            continue
        lines += ["", f"## [{name}]", "", "| key | type | default | |", "|---|---|---|---|"]
        for key in described(table):
            cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.text)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## [method]", "", "`name` and the options of that method: [Methods](methods.md)."]
    return "\n".join(lines) + "\n"


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
