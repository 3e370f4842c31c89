"""Files and functions that a reader can hold in mind; what is longer has a reason."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
FILE, FUNCTION = 300, 40
"""Most lines of a file, and of a function without its docstring."""
REASONS = {
    "fedstrata/cli/forecast.py:forecast": "the command's options, a line or two each",
}
"""Longer ones, and why they are."""


def long_ones() -> set[str]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text("utf-8")
        if len(text.splitlines()) > FILE:
            found.add(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                docstring = (ast.get_docstring(node, clean=False) or "").splitlines()
                if node.end_lineno - node.lineno + 1 - len(docstring) > FUNCTION:
                    found.add(f"{name}:{node.name}")
    return found


def test_files_and_functions_are_short_or_have_a_reason() -> None:
    assert long_ones() == REASONS.keys()


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by their bare names: the second of a name would not be collected."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
