"""What the documents say is true: their commands run, their jobs load, their links lead somewhere."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import transformers
from typer.testing import CliRunner

from deployment import TRIED
from fedstrata.cli import app
from fedstrata.client.setup import check_plans
from fedstrata.job.file import load
from fedstrata.job.tables import Job
from fedstrata.models.checkpoints import auto_class
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.sweeps.cells import cells

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
Jobs = Callable[..., dict[str, Any]]


def blocks(page: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [text for written, text in found if written == language]


def commands(page: Path) -> list[str]:
    return [line.split("  #")[0].strip() for block in blocks(page) for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"make ([\w-]+)(?=`| *#|\n)", page.read_text("utf-8")):
        assert target in targets


def test_readme_commands_run(job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in a folder with a small job.toml; the report compares two runs made the same way."""
    monkeypatch.chdir(tmp_path)
    made = job("fedavg", "classify", output={"dir": "runs/try"})
    (tmp_path / "job.toml").write_text(tomli_w.dumps(made), "utf-8")
    runner = CliRunner()
    for name in ("a", "b"):
        done = runner.invoke(app, ["run", "job.toml", "method.rounds=1", f"output.dir=runs/{name}"])
        assert done.exit_code == 0, done.output
    lines = [line for line in commands(ROOT / "README.md") if line.startswith(".venv/bin/fedstrata ")]
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line)[1:]
        if "--resume" in words:
            words.append("method.rounds=10")
        done = runner.invoke(app, words)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert (tmp_path / "report.html").exists()


def test_the_commands_between_sites_are_those_that_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Federations are made here; what stays running is run by :class:`deployment.Deployment`, word for word."""
    monkeypatch.chdir(tmp_path)
    for name in ("ca.pem", "server.pem", "server.key"):
        (tmp_path / name).touch()
    runner = CliRunner()
    for page in (ROOT / "docs" / "deploy.md", ROOT / "README.md"):
        shutil.rmtree("federation", ignore_errors=True)
        lines = [line for line in commands(page) if line.startswith("fedstrata ")]
        assert len(lines) >= 4
        for line in lines:
            if line.startswith("fedstrata federation "):
                shutil.rmtree("federation", ignore_errors=True)
                done = runner.invoke(app, shlex.split(line)[1:])
                assert done.exit_code == 0, f"{line}\n{done.output}"
            else:
                assert line in TRIED, f"{page.name}: {line}"


def test_readme_job_is_legal() -> None:
    [text] = blocks(ROOT / "README.md", "toml")
    [job] = load(tomllib.loads(text))
    assert job.output.dir == "runs/try"


def test_the_job_page_names_every_key_and_only_legal_ones() -> None:
    """Each value of the long example is legal by itself, and each key of each table stands there."""
    example = tomllib.loads(blocks(ROOT / "docs" / "job.md", "toml")[0])
    base = {"model": {"name": "x"}, "task": {"kind": "mlm"}, "data": {"train": "x"}, "method": {"name": "fedavg"}}
    for table, values in example.items():
        if table != "method":
            annotation = Job.model_fields[table].annotation
            kind = next(
                t for t in (annotation, *getattr(annotation, "__args__", ())) if hasattr(t, "model_fields")
            )
            assert set(values) == set(kind.model_fields), table
        for key, value in values.items():
            changed = {**base, table: {**base.get(table, {}), key: value}}
            if table == "model" and key != "name":
                changed[table] = {"config": example["model"]["config"], key: value}
            if (table, key) == ("data", "test"):
                changed.pop("clients", None)
            if key in ("sizes", "table", "column"):
                changed["clients"]["split"] = key
            if key in ("metric", "labels", "positive") or table == "head":
                changed["task"]["kind"] = "classify"
            if table == "head":
                changed["head"].setdefault("kind", "psum")
            if (table, key) == ("engine", "federation"):
                changed["engine"]["name"] = "flower"
            load(changed)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.toml")), ids=lambda path: path.name)
def test_configs_resolve_and_open_with_their_command(path: Path) -> None:
    """And every method of theirs has a plan for every round and client of a BERT-base."""
    text = path.read_text("utf-8")
    assert f"fedstrata run {path.relative_to(ROOT)}" in text.split("\n[")[0]
    overrides = [cell.pairs for cell in cells(path)[2]] if "[sweep]" in text else [()]
    alike = {
        json.dumps([p for p in pairs if "seed" not in p[0] and "dir" not in p[0]]): pairs for pairs in overrides
    }
    for pairs in alike.values():
        for job in load(path, pairs):
            check_plans(job, bert_base(job.task.kind), [f"client-{i}" for i in range(6)])


@functools.cache
def bert_base(kind: str) -> Parts:
    with torch.device("meta"):
        return find_parts(auto_class(kind).from_config(transformers.BertConfig()))


def test_the_papers_tables_are_there() -> None:
    """One config each; FedBT's Table 2 was never seen, FedBFPT's Table 1 holds no figures."""
    there = {path.relative_to(ROOT / "configs").as_posix() for path in ROOT.glob("configs/*/table*.toml")}
    tables = {
        "fedbfpt": (2, 3, 4, 5, 6),
        "fedbt": (1, 3, 4, 5, 6, 7),
        "fedsplitbert": (3, 4, 5, 6),
        "fedfreezebert": (3,),
        "fedbert": (6, 7, 8),
    }
    assert there == {f"{name}/table{i}.toml" for name, numbers in tables.items() for i in numbers}


def test_the_picture_is_what_the_plans_say(tmp_path: Path) -> None:
    made = tmp_path / "parts.svg"
    script = ROOT / "examples" / "parts_picture.py"
    subprocess.run([sys.executable, script, made], check=True)
    assert made.read_bytes() == (ROOT / "docs" / "parts.svg").read_bytes()
