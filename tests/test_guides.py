"""The guides: their commands run, their code works, their pieces of job and site files are valid."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
import transformers
import typer

import fedstrata
from fedstrata.cli import app
from fedstrata.job.file import load
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.methods import METHODS
from fedstrata.sites.settings import SiteSettings
from fedstrata.sweeps.cells import Sweep, cells
from fedstrata.tasks import TASKS
from pages import DOCS, commands_of, follow, page_blocks
from tiny import SENTENCES, tiny_model, tokenizer

GUIDES = sorted((DOCS / "guides").glob("*.md"))
HUB = "bert-base-uncased"
TWO_ROWS = '[{name = "FedAvg"}, {name = "FedSplitBERT", method = {name = "fedsplitbert"}}]'
SMALL = {
    "from-scratch": {"run": ["model.config.num_hidden_layers=1", "train.steps=1", "method.rounds=1"]},
    "non-iid": {"run": ["sweep.seeds=[0]", f"sweep.rows={TWO_ROWS}", "train.steps=1", "method.rounds=1"]},
    "audit": {"audit": ["train.steps=2"]},
}
"""Guide -> command -> what is added to it, so that it takes a second."""
FILE_KINDS = ("pem", "key", "csv", "jsonl", "toml", "txt", "py", "safetensors", "onnx", "json", "html")
JOB: dict[str, Any] = {
    "task": {"kind": "classify"},
    "data": {"train": "rows.csv"},
    "clients": {"count": 2},
    "method": {"name": "fedavg", "rounds": 2},
    "train": {"batch_size": 8, "max_tokens": 16, "precision": "fp32"},
    "output": {"dir": "runs/first"},
}
"""A job file with the folder that ``init`` names."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: a job, its rows, public text, and a tiny model in place of a hub's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known, modules = (dict(TASK_KINDS), dict(TASKS)), set(sys.modules)
    rows = [f'"{text} {i}",{label}' for i in range(8) for text, label in SENTENCES]
    Path("rows.csv").write_text("\n".join(["text,label", *rows]), "utf-8")
    Path("public.txt").write_text("\n".join(f"{text} {i}" for i in range(8) for text, _ in SENTENCES), "utf-8")
    tiny_model("bert", head="none").save_pretrained("tiny")
    tokenizer().save_pretrained("tiny")
    Path("job.toml").write_text(tomli_w.dumps({"model": {"name": "tiny"}, **JOB}), "utf-8")
    yield tmp_path
    for kinds, before in zip((TASK_KINDS, TASKS), known, strict=True):
        kinds.clear()
        kinds.update(before)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_works(page: Path, folder: Path) -> None:
    """Its commands and its code, word for word, but with a tiny model in place of one from a hub."""
    if page.stem == "choose-a-method":
        transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(HUB)
        blocks = page_blocks(page)
    else:
        blocks = page_blocks(page, {"distilbert-base-uncased": "tiny", HUB: "tiny"})
    outputs = [output for _, output in follow(blocks, SMALL.get(page.stem, {}))]
    for block in blocks:
        if block.language == "text" and "TFLOP" in block.text:
            assert squeezed(block.text) in squeezed("\n".join(outputs)), "a table that the command prints"
    for start in re.findall(r"is kept in `([^`]+)`\s+as a Hugging Face folder", page.read_text("utf-8")):
        assert (Path(start) / "model.safetensors").exists(), "a folder that the run leaves"


def squeezed(table: str) -> str:
    """A table without the blanks that depend on the width of the screen."""
    return re.sub(r"\s+", " ", re.sub("─+", "", table)).strip()


def test_every_row_of_the_sweep_is_valid(folder: Path) -> None:
    """Of the guide of which the test above runs two rows."""
    [block] = [block for block in page_blocks(DOCS / "guides" / "non-iid.md") if block.title == "job.toml"]
    Path("job.toml").write_text(block.text, "utf-8")
    found = cells(Path("job.toml"))[2]
    assert len(found) == 15
    for cell in found:
        load(Path("job.toml"), cell.pairs)


def test_the_task_of_the_guide_trains_in_workers(folder: Path) -> None:
    [block] = [block for block in page_blocks(DOCS / "guides" / "add-a-task.md") if block.title == "smooth.py"]
    Path("smooth.py").write_text(block.text, "utf-8")
    smooth = importlib.import_module("smooth").Smooth
    scores = [
        fedstrata.run("job.toml", {"engine.name": name, "output.dir": name, "method.rounds": 1}, task=smooth).score
        for name in ("inprocess", "pool")
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_pieces_of_settings_are_valid(page: Path) -> None:
    """Each piece with a language but no file name is one of a job, or of a site's settings, that is valid."""
    for block in page_blocks(page):
        if block.language == "toml" and not block.title:
            piece = tomllib.loads(block.text)
            if site_piece(piece):
                continue
            over = {name: {**JOB.get(name, {}), **table} for name, table in piece.items()}
            if "tokens_per_batch" in over.get("train", {}):
                del over["train"]["batch_size"]
            load({"model": {"name": "tiny"}, **JOB, **over})


def site_piece(piece: dict[str, Any]) -> bool:
    """Whether this is a piece of a ``site.toml``; if so, it is valid, but for the folder of ``model.path``."""
    fields: Any = SiteSettings.model_fields
    known = {name: fields[name].annotation for name in piece if name in fields}
    if not all(name in known and set(keys) <= set(known[name].model_fields) for name, keys in piece.items()):
        return False
    for name in piece.keys() - {"model"}:
        known[name].model_validate(piece[name])
    return True


def test_keys_that_pages_name_exist() -> None:
    """Every ``table.key`` in backticks, in any page for users."""
    tables = {name: field_names(field.annotation) for name, field in Job.model_fields.items()}
    tables["method"] = {"name", *(option for method in METHODS.values() for option in method.model_fields)}
    tables["model"] |= {"config"}
    tables |= {"sweep": set(Sweep.model_fields), "stages": set(Job.model_fields)}
    count = 0
    for page in [*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md"), *GUIDES]:
        for quoted in re.findall(r"`([^`\n]+)`", page.read_text("utf-8")):
            for table, key in re.findall(r"(?<![\w./])([a-z]+)\.([a-z_]+)\b(?![(/])", quoted):
                if tables.get(table) and key not in FILE_KINDS:
                    count += 1
                    assert key in tables[table], f"{page.name}: {table}.{key}"
    assert count > 50


def field_names(annotation: Any) -> set[str]:
    """The keys of a table, or none of a field that is no table."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")]
    return {name for kind in kinds for name in kind.model_fields}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_job_page_runs(folder: Path) -> None:
    """Its forecasts, and how an adapter is loaded, over a run that has one."""
    pytest.importorskip("peft")
    blocks = page_blocks(DOCS / "job.md", {"DIR": "tiny", HUB: "tiny"})
    forecasts = [block for block in blocks if block.text.startswith("fedstrata forecast")]
    assert len(forecasts) == 1
    follow([replace(forecasts[0], language="bash")], {})
    fedstrata.run("job.toml", {"adapter.kind": "lora", "method.rounds": 1, "output.dir": "runs/try"})
    names: dict[str, Any] = {}
    [code] = [block.text for block in blocks if block.language == "python"]
    exec(code, names)
    assert type(names["model"]).__name__ == "PeftModel"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_commands_that_pages_show_have_options_that_exist(page: Path) -> None:
    """Of every page and block, without running them."""
    for block in page_blocks(page):
        for line in block.text.splitlines() if block.language in ("", "bash", "text") else ():
            if line.startswith("fedstrata "):
                command: Any = typer.main.get_command(app)
                words = commands_of(line)[0]
                while hasattr(command, "commands"):
                    words = words[1:]
                    command = command.commands[words[0]]
                assert command.make_context(words[0], words[1:])
