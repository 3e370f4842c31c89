"""Fixtures over the tiny models of :mod:`tiny`."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries that read it
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors gain nothing from more threads, and engines count cores by it

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tiny import SENTENCES, gpt2_tokenizer, tiny_model, tokenizer

RUNS = (
    "bad_inputs",
    "cli",
    "components",
    "runs",
    "sites",
    "sweeps",
    "test_benchmarks.py",
    "test_board_run.py",
    "test_docs.py",
    "test_guides.py",
    "test_tutorials.py",
)
"""Folders and files whose tests play whole runs or start processes."""

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # the same examples on any machine, however busy it is
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``run`` what takes seconds, so that ``make check`` can leave it out: a test with a job runs it."""
    root = Path(__file__).parent
    for item in items:
        if "job" in getattr(item, "fixturenames", ()) or item.path.relative_to(root).parts[0] in RUNS:
            item.add_marker("run")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSTRATA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes Hugging Face folders of tiny models: ``model_folder("bert", head="mlm", layers=3)``."""

    def make(kind: str = "bert", **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tiny_model(kind, **changes).save_pretrained(folder)
        (gpt2_tokenizer() if kind == "gpt2" else tokenizer()).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def sentences_csv(tmp_path: Path) -> Path:
    """The sentences as a file with columns text and label."""
    path = tmp_path / "sentences.csv"
    path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in SENTENCES), "utf-8")
    return path


@pytest.fixture
def job(model_folder: Callable[..., Path], sentences_csv: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes small jobs as mappings: ``job("fedavg", "mlm", 3, train={...})``."""

    def make(name: str = "fedavg", kind: str = "mlm", layers: int = 3, /, **tables: Any) -> dict[str, Any]:
        made: dict[str, Any] = {
            "model": {"name": str(model_folder(layers=layers))},
            "task": {"kind": kind},
            "data": {"train": str(sentences_csv), "test": str(sentences_csv)},
            "clients": {"count": 3},
            "method": {"name": name, "rounds": 2},
            "train": {"batch_size": 2, "max_tokens": 32, "precision": "fp32", "device": "cpu"},
            "output": {"dir": str(tmp_path / "run")},
        }
        for key, table in tables.items():
            made[key] = {**made.get(key, {}), **table}
        return made

    return make
