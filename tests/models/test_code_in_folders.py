"""Code that lies in a model's folder is never run, whatever it is called; a head of ours is known without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
@pytest.mark.parametrize("place", ["plain", "encoder", "around"])
def test_code_for_attention_is_not_fetched(model_folder: Callable[..., Path], form: str, place: str) -> None:
    """No config may name a kernel of the hub, nor one with a head of ours in or around its encoder's."""
    folder = model_folder(head="classify")
    path = folder / "config.json"

    def change(**keys: Any) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    kernel = {"attn_implementation": "kernels-community/flash-attn2"}
    change(**({} if place == "around" else kernel))
    if place != "plain":
        change(**{KEY: {"kind": "mean"}})
        write_headed(folder)
    if place == "around":
        change(**{"encoder": {**json.loads(path.read_text())["encoder"], "attn_implementation": "sdpa"}, **kernel})
    with pytest.raises(UserError, match="asks for attention 'kernels-community/flash-attn2'"):
        use(folder, form)
