"""What pages say beyond commands and keys: rules, fields, files and words, held to the code that they are about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import DOCS

ROOT = DOCS.parent
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
BRITISH = re.compile(
    r"\b(defence|travell|labell|modell|learnt|behaviour|colour|favour|neighbour|grey|"
    r"(organ|optim|initial|normal|recogn|summar|random|minim|maxim|real)is(e|es|ed|ing)\b)",
    re.IGNORECASE,
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_in_american_spelling(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.name in ("CHANGELOG.md", "job.md"):  # which name the old keys
        text = re.sub(r"^.*(optimiser|centralised).*$", "", text, flags=re.MULTILINE)
    assert not BRITISH.findall(text)


def test_what_a_user_reads_on_screen_is_in_american_spelling() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"\b([Gg]rey|learnt|labell|defence)", path.read_text("utf-8")), path
