"""With the core dependencies alone, no extra: everything but the extras works, and those say what to install."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PLAY = """
import json, sys
absent, steps = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(absent))  # as if they were not installed
from typer.testing import CliRunner
from fedstrata.cli import app
done = [CliRunner().invoke(app, step) for step in steps]
found = [(one.exit_code, one.output, repr(one.exception)) for one in done]
from transformers import pipeline
found.append((0, pipeline("text-classification", "runs/first/model")("The heart is large.")[0]["label"], ""))
json.dump(found, open("found.json", "w"))
"""
QUICK = ("method.rounds=1", "train.batch_size=2")
LABELS = 'task.labels=["eye", "heart", "kidney"]'
EXTRAS = {
    "excel": ("init", "rows.xlsx"),
    "flower": ("federation", "init", "federation", "--sites", "north,south", "--host", "localhost"),
    "lora": ("run", "job.toml", "adapter.kind=lora", "output.dir=runs/lora"),
    "onnx": ("export", "runs/first", "--onnx"),
    "privacy": ("run", "job.toml", "privacy.level=example", "privacy.epsilon=8", LABELS, "output.dir=runs/noise"),
    "sentence-transformers": ("export", "runs/first", "--sentence-transformers"),
    "track": ("run", "job.toml", 'track.to=["mlflow"]', "output.dir=runs/tracked"),
}
"""Extra -> a command that needs it."""


def core(wanted: Iterable[str]) -> set[str]:
    """The distributions that these requirements bring, by their canonical names."""
    seen, waiting = set[tuple[str, frozenset[str]]](), [Requirement(line) for line in wanted]
    while waiting:
        one = waiting.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            needs = [Requirement(line) for line in requires(one.name) or ()]
        except PackageNotFoundError:
            continue  # for another platform
        asked = ("", *one.extras)
        waiting += [
            need for need in needs if not need.marker or any(need.marker.evaluate({"extra": e}) for e in asked)
        ]
    return {name for name, _ in seen}


@pytest.mark.run
def test_what_the_core_dependencies_do_and_what_the_extras_say(
    model_folder: Callable[..., Path], sentences_csv: Path, tmp_path: Path
) -> None:
    """In a process of its own, in which nothing else can be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    there = core(project["dependencies"])
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*there, "fedstrata"}
    ]
    assert {"grpc", "flwr", "peft", "pytest"} <= set(absent)
    assert not {"torch", "numpy", "pandas"} & set(absent)
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    steps = [
        ("init", str(sentences_csv), "--model", str(model_folder(head="none")), "--clients", "2"),
        ("validate", "job.toml"),
        ("run", "job.toml", *QUICK),
        ("report", "runs/first"),
        ("forecast", "job.toml"),
        *([*words, *QUICK] if words[0] == "run" else words for words in EXTRAS.values()),
    ]
    play = [sys.executable, "-c", PLAY]
    subprocess.run(play, input=json.dumps([absent, steps]), text=True, check=True, cwd=tmp_path, timeout=300)
    found = json.loads((tmp_path / "found.json").read_text())
    for step, (code, output, error) in zip(steps[:5], found, strict=False):
        assert code == 0, f"{step}\n{output}\n{error}"
    for extra, (code, output, error) in zip(EXTRAS, found[5:], strict=False):
        assert code == 2, f"{extra}\n{output}\n{error}"
        wanted = "pip install mlflow" if extra == "track" else f"pip install 'fedstrata[{extra}]'"
        assert wanted in output, output
    assert found[-1][1] in ("eye", "heart", "kidney")
