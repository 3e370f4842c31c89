"""The generated pages lack nothing: commands and options, keys of all files, methods, the Python API."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click
import pytest
import typer
from pydantic import BaseModel

import fedstrata
from fedstrata.cli import app
from fedstrata.job.tables import Job
from fedstrata.methods import METHODS
from fedstrata.sites.settings import ServerSettings, SiteSettings
from fedstrata.sweeps.cells import Sweep
from pages import DOCS


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The module that makes the pages."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("generate", DOCS / "site" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for child in getattr(command, "commands", {}).values():
        yield from commands(child, f"{name} {child.name}")


def section(text: str, heading: str) -> str:
    """What stands under a heading, down to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def test_every_command_and_option_is_on_the_page(pages: Any) -> None:
    text = pages.commands_page()
    for name, command in commands(typer.main.get_command(app), "fedstrata"):
        if not command.hidden:
            part = section(text, name)
            assert (command.help or "").strip().splitlines()[0] in part
            for option in command.params:
                words = ", ".join(option.opts) if isinstance(option, click.Option) else option.name
                assert f"| `{words}` |" in part, f"{name} {words}"
                assert option.name == "help" or getattr(option, "help", None), f"{name} {words} has no help"


def test_every_key_of_every_file_is_on_its_page(pages: Any) -> None:
    def check(text: str, settings: type[BaseModel], prefix: str) -> None:
        for name, table in pages.tables(settings).items():
            if name != "method":
                part = section(text, f"{prefix}[{name}]")
                for key in table.model_fields:
                    assert f"| `{key}` |" in part, f"[{name}] {key}"

    check(pages.keys_page(), Job, "")
    assert all(f"| `{key}` |" in section(pages.keys_page(), "[sweep]") for key in Sweep.model_fields)
    for file, settings in ("site.toml", SiteSettings), ("server.toml", ServerSettings):
        text = pages.sites_page()
        check(text, settings, f"{file}: ")
        for key in settings.model_fields.keys() - pages.tables(settings).keys():
            assert f"| `{key}` |" in section(text, file)


def test_every_method_and_option_is_on_the_page(pages: Any) -> None:
    text = pages.methods_page()
    for name, method in METHODS.items():
        part = section(text, name)
        assert all(re.search(rf"\b{option}\b", part) for option in method.model_fields)


def test_every_public_name_is_on_the_page_of_the_api(pages: Any) -> None:
    members = re.findall(r"members: \[(.*)\]", pages.PYTHON)[0].split(", ")
    paths = re.findall(r"^::: (\S+\.\S+)$", pages.PYTHON, re.MULTILINE)
    assert set(fedstrata.__all__) <= {*members, *(path.rsplit(".", 1)[1] for path in paths)}
