"""Code that lies in a model's folder is never run, whatever it is called; a head of ours is known without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.errors import UserError
from fedstrata.models.folders import CODE
from fedstrata.models.headed import write_headed
from fedstrata.models.heads import KEY
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


def use(folder: Path, form: str) -> None:
    """Do with a folder's model what users do with one."""
    if form == "model":
        load_model(folder, "classify")
    elif form == "pipeline":
        pipeline(folder, "classify")("the heart")
    elif form == "onnx":
        pytest.importorskip("onnxruntime")
        export(folder)
    else:
        pytest.importorskip("sentence_transformers")
        export_sentences(folder)


FORMS = pytest.mark.parametrize("form", ["model", "pipeline", "onnx", "sentence-transformers"])


@pytest.mark.filterwarnings("ignore")
@FORMS
def test_a_folders_code_is_not_run(hostile: Path, tmp_path: Path, form: str) -> None:
    use(hostile, form)
    assert not (tmp_path / "was run").exists()


@FORMS
@pytest.mark.parametrize("headed", [False, True])
def test_code_for_attention_is_not_fetched(model_folder: Callable[..., Path], form: str, headed: bool) -> None:
    """Neither a plain config nor one with a head of ours may name a kernel of the hub."""
    folder = model_folder(head="classify")
    config = json.loads((folder / "config.json").read_text())
    config["attn_implementation"] = "kernels-community/flash-attn2"
    (folder / "config.json").write_text(json.dumps({**config, KEY: {"kind": "mean"}} if headed else config))
    if headed:
        write_headed(folder)
    with pytest.raises(UserError, match="asks for attention 'kernels-community/flash-attn2'"):
        use(folder, form)
