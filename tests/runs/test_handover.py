"""A model for use elsewhere: as ONNX, compared with the original, and pushed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fedstrata
from fedstrata.errors import UserError
from fedstrata.runs.handover import export, model_folder, push
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_the_exported_model_gives_the_models_logits(job: Jobs, kind: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    rows = [
        {
            "text": text.split() if kind == "tag" else text,
            "label": ["O"] * len(text.split()) if kind == "tag" else label,
        }
        for text, label in SENTENCES
    ]
    if kind == "tag":
        rows[0]["label"][1] = "B-X"  # type: ignore[index]
    result = fedstrata.run(job("fedavg", kind, data={"train": rows, "test": rows}, method={"rounds": 1}))
    [whole, small], where = export(result.folder, int8=True)
    assert "plain texts, as the test rows cannot be read" in where, "they were in memory"
    assert whole.difference < 1e-4
    assert whole.agreement == 1
    assert small.bytes < whole.bytes
    assert result.model_folder is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.folder / "onnx")
    auto = {"classify": "AutoModelForSequenceClassification", "tag": "AutoModelForTokenClassification"}[kind]
    model = getattr(transformers, auto).from_pretrained(result.model_folder).eval()
    inputs = tokenizer(["the heart", "a stone in the kidney of the eye"], return_tensors="pt", padding=True)
    session = onnxruntime.InferenceSession(str(whole.path))
    [found] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    with torch.inference_mode():
        assert np.allclose(found, model(**inputs).logits.numpy(), atol=1e-5)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for use in (model_folder, export, lambda folder: push(folder, "a/b")):
        with pytest.raises(UserError, match="holds no model"):
            use(tmp_path)


def test_push_uploads_the_models_folder_and_is_private(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls = list[tuple[str, Any]]()

    class Hub:
        token = "secret"

        def create_repo(self, name: str, **how: Any) -> str:
            calls.append((name, how["private"]))
            return f"https://hub/{name}"

        def upload_folder(self, **how: Any) -> None:
            calls.append((how["repo_id"], how["folder_path"]))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    result = fedstrata.run(job("fedavg", "classify", method={"rounds": 1}))
    assert push(result.folder, "lab/model") == "https://hub/lab/model"
    assert calls == [("lab/model", True), ("lab/model", str(result.model_folder))]
