"""A page of the documents, followed as its reader would: files saved, commands run, code executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedstrata.cli import app

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
INSTALL = "pip install -c constraints.txt '.["


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; a title names the file that it is saved as."""

    language: str
    title: str
    text: str


def page_blocks(page: Path, replaced: Mapping[str, str] | None = None) -> list[Block]:
    """The blocks of a page, with some words replaced, such as the model of a hub by a tiny one."""
    text = page.read_text("utf-8")
    for word, other in (replaced or {}).items():
        text = text.replace(word, other)
    return [Block(*found) for found in BLOCK.findall(text)]


def commands_of(text: str) -> list[list[str]]:
    """The words of each command of a block; what a line says behind two blanks and a # is a comment."""
    lines = (line.split("  #")[0].strip() for line in text.splitlines())
    return [shlex.split(line) for line in lines if line and not line.startswith(INSTALL)]


def follow(blocks: list[Block], added: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Do in the working directory what the blocks say; returns each command that was run, and what it printed.

    Args:
        blocks: of one page, in their order.
        added: command -> words to add, such as a tiny model or fewer rounds.
    """
    ran, names = list[tuple[str, str]](), dict[str, Any]()
    for block in blocks:
        if block.title:
            Path(block.title).parent.mkdir(exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            for program, command, *words in commands_of(block.text):
                assert program == "fedstrata"
                done = CliRunner().invoke(app, [command, *words, *added.get(command, [])])
                assert done.exit_code == 0, f"{command} {words}\n{done.output}"
                ran.append((command, done.output))
        elif block.language == "python":
            exec(block.text, names)
    return ran


def named_in_output_files() -> set[str]:
    """What the page of output files names: files, folders and fields."""
    return set(re.findall(r"`([^`]+)`", (DOCS / "output-files.md").read_text("utf-8")))


def unnamed_files(folder: Path) -> set[str]:
    """Files and folders directly in an output folder that the page of output files does not name."""
    within = {"stages/": "stages/NAME/", "clients/": "clients/NAME/model/", "cells/": "cells/ROW/seed-N/"}
    found = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    found = {".lock-N" if name.startswith(".lock-") else within.get(name, name) for name in found}
    return found - named_in_output_files()
