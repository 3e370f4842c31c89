"""The tutorials as a reader follows them, files saved, commands run, code executed; and the site they stand in."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedstrata.cli import app
from fedstrata.job.tables import Job
from fedstrata.methods import METHODS

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_works(
    page: Path, model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, but with a tiny model in place of one from a hub."""
    monkeypatch.chdir(tmp_path)
    kinds = {"own-table": "none", "own-entities": "none", "own-texts": "mlm"}
    model = model_folder("bert", head=kinds[page.stem])
    ran = list[str]()
    for language, title, text in BLOCK.findall(page.read_text("utf-8")):
        if title:
            Path(title).parent.mkdir(exist_ok=True)
            Path(title).write_text(text, encoding="utf-8")
        elif language == "bash":
            for line in text.splitlines():
                words = shlex.split(line)[1:]
                words += ["--model", str(model)] if words[0] == "init" else []
                done = CliRunner().invoke(app, words)
                assert done.exit_code == 0, f"{line}\n{done.output}"
                ran.append(words[0])
        elif language == "python":
            names: dict[str, Any] = {}
            exec(text, names)
    assert {"init", "run"} <= set(ran)
    assert (tmp_path / "runs" / "first" / "report.html").exists()


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
