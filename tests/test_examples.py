"""The examples run as they stand, with a tiny model, and the notebooks are kept with what they printed."""

from __future__ import annotations

import functools
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.data import demo

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell in its order, but each client makes one step in a round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "definitions", functools.cache(demo.definitions))
    model = model_folder(head="none")
    names: dict[str, Any] = {}
    for cell in cells(path, "code"):
        text = "".join(cell["source"])
        first, _, rest = text.partition("\n")
        if written := re.fullmatch(r"%%writefile (\w+\.py)", first):
            (tmp_path / written[1]).write_text(rest, encoding="utf-8")
            continue
        text = text.replace('"demo:minilm"', repr(str(model))).replace('"max_tokens": 48', '"max_tokens": 32')
        text = re.sub(r'("test": (?:test|"demo:hpo-test"))}', r'\1, "limit": 60}', text)
        text = text.replace('"steps": 20', '"steps": 1').replace('"batch_size": 16', '"batch_size": 4, "steps": 1')
        exec(compile(text, path.name, "exec"), names)
    runs = [tmp_path / "runs" / path.stem.replace("_", "-"), *tmp_path.glob("runs/*/*")]
    assert any((run / "result.json").exists() for run in runs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_from_top_to_bottom(path: Path) -> None:
    kept = cells(path, "code")
    assert [cell["execution_count"] for cell in kept] == list(range(1, len(kept) + 1))
    outputs = [output for cell in kept for output in cell["outputs"]]
    assert len(outputs) >= 4
    assert {output["output_type"] for output in outputs} <= {"execute_result", "display_data", "stream"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|Users)/", json.dumps(outputs)), "a path of the machine it ran on"


def test_notebooks_name_files_that_are_there() -> None:
    for path in NOTEBOOKS:
        for cell in cells(path, "markdown"):
            for target in re.findall(r"\]\(([^)]+)\)", "".join(cell["source"])):
                assert (path.parent / target).exists(), target


def test_the_script_of_a_transformers_user_runs(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(EXAMPLES / "from_transformers.py"))
    small = {name: names["rows"](name).select(range(8)) for name in ("hpo-train", "hpo-test")}
    names["main"].__globals__["rows"] = small.__getitem__
    names["main"](str(model_folder(head="none")))
    printed = capsys.readouterr().out
    assert "score {'accuracy': " in printed
    assert len(re.findall(r"'(?:eye|cardiovascular system)'", printed)) == 2
