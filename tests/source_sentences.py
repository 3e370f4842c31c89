"""What the code can say: every string literal that is no docstring, with … for what is filled in."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


@functools.cache
def source_sentences() -> frozenset[str]:
    """Each literal of the package; parts of one expression are put together."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {_text(node) for node in ast.walk(tree) if id(node) not in docstrings}
    return frozenset(found)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def can_say(quoted: str) -> bool:
    """Whether some literal has the quoted words in their order; a … of the quotation stands for anything."""
    pieces = [re.escape(piece.strip()) for piece in quoted.split("…") if piece.strip()]
    said = re.compile(".*".join(pieces), re.DOTALL)
    return any(said.search(sentence) for sentence in source_sentences())
