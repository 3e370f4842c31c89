"""The tutorials as a reader follows them, files saved, commands run, code executed; and the site they stand in."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.job.tables import Job
from fedstrata.methods import METHODS
from pages import DOCS, follow, page_blocks
from tiny import SENTENCES

ROOT = DOCS.parent
TUTORIALS = sorted({*(DOCS / "tutorials").glob("*.md")} - {DOCS / "tutorials" / "two-machines.md"})
"""All but the one that tests/sites/test_two_machines.py follows."""
HEADS = {"own-texts": "mlm"}
"""Tutorial -> the head of its model, where that is not a new one."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a few rows in place of the demo's."""
    monkeypatch.chdir(tmp_path)
    rows = [f'"{text} {i}",{label}' for i in range(8) for text, label in SENTENCES]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]), "utf-8")
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_works(page: Path, model_folder: Callable[..., Path], folder: Path) -> None:
    """Word for word, but with a tiny model in place of one from a hub, and a few rows in place of the demo's."""
    model = str(model_folder("bert", head=HEADS.get(page.stem, "none")))
    small = {"demo:minilm": model, "demo:hpo-train": "rows.csv", "demo:hpo-test": "rows.csv"}
    ran = [command for command, _ in follow(page_blocks(page, small), {"init": ["--model", model]})]
    if page.stem == "first-federation":
        assert ran == ["partition", "forecast", "run", "run", "report"]
        assert (folder / "runs" / "fedbt" / "report.html").exists()
    else:
        assert {"init", "run"} <= set(ran)
        assert (folder / "runs" / "first" / "report.html").exists()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    keys = (tmp_path / "site" / "reference" / "keys.html").read_text("utf-8")
    for name in ("learning_rate", "long_text", "partition", *Job.model_fields):
        assert name in keys or name in ("stage", "start")
    methods = (tmp_path / "site" / "reference" / "methods.html").read_text("utf-8")
    assert all(f'id="{name}"' in methods for name in METHODS)
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text("utf-8")
    assert all(word in commands for word in ("fedstrata run", "fedstrata federation init", "--resume"))
    pages = list((tmp_path / "site").rglob("*.html"))
    loaded = [
        re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)', page.read_text("utf-8")) for page in pages
    ]
    assert not any(loaded), "nothing is loaded from elsewhere"
    styles = [
        re.findall(r'<link[^>]+href="(https?:[^"]+)"[^>]*stylesheet', page.read_text("utf-8")) for page in pages
    ]
    assert not any(styles)
