"""Code that lies in a model's folder is never run, whatever it is called; a head of ours is known without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.models.folders import CODE
from fedstrata.runs.handover import export, export_sentences
from fedstrata.runs.views import load_model, pipeline


@pytest.fixture
def hostile(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A classifier whose folder has code under the name that a run gives its own; it leaves a file behind."""
    folder = model_folder(head="classify")
    (folder / f"{CODE}.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\n")
    names = {"AutoConfig": "Any", "AutoModel": "Any", "AutoModelForSequenceClassification": "Any"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "auto_map": {auto: f"{CODE}.{name}" for auto, name in names.items()}})
    )
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["model", "pipeline", "onnx", "sentence-transformers"])
def test_a_folders_code_is_not_run(hostile: Path, tmp_path: Path, form: str) -> None:
    if form == "model":
        load_model(hostile, "classify")
    elif form == "pipeline":
        pipeline(hostile, "classify")("the heart")
    elif form == "onnx":
        pytest.importorskip("onnxruntime")
        export(hostile)
    else:
        pytest.importorskip("sentence_transformers")
        export_sentences(hostile)
    assert not (tmp_path / "was run").exists()
