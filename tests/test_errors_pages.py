"""Troubleshooting and errors: every sentence that the pages quote is one that the code can say."""

from __future__ import annotations

import re

import pytest

from pages import DOCS
from source_sentences import can_say

QUOTED = re.findall(r"^\| `([^`]+)`", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("sentence", QUOTED)
def test_a_quoted_sentence_is_in_the_source(sentence: str) -> None:
    assert can_say(sentence)


def test_the_page_quotes_sentences_and_the_search_tells_them_apart() -> None:
    assert len(QUOTED) > 30
    assert not can_say("is not empty … and neither is the moon")
    assert not can_say("training diverged … its")


def test_the_python_block_of_the_errors_page_prints_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / "errors.md").read_text("utf-8"), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == "nowhere.toml: cannot be read (No such file or directory)\n"
