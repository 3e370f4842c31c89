"""A regression in bf16 predicts in fp32: numbers in the user's units lose nothing to 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fedstrata
from fedstrata.client.working_model import WorkingModel
from fedstrata.models.numbers import NumberLinear
from fedstrata.models.parts import find_parts
from tiny import SENTENCES, tiny_model, tokenizer

Job = Callable[..., dict[str, Any]]
LEVEL = 135.0


@pytest.fixture
def numbers(job: Job, tmp_path: Path) -> dict[str, Any]:
    """Blood pressures: the start model knows their level."""
    rows = "".join(f'"{text}",{LEVEL + 0.3 * i}\n' for i, (text, _) in enumerate(SENTENCES))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows, "utf-8")
    start = tmp_path / "start"
    model = tiny_model(head="regress", num_labels=1)
    torch.nn.init.constant_(model.classifier.bias, LEVEL)
    torch.nn.init.normal_(model.classifier.weight, std=5.0, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(start)
    tokenizer().save_pretrained(start)
    data = {"train": str(tmp_path / "rows.csv"), "test": str(tmp_path / "rows.csv")}
    return job(
        "fedavg",
        "regress",
        model={"name": str(start)},
        data=data,
        train={"precision": "bf16", "learning_rate": 1e-3},
        output={"predictions": True},
    )


def plainly(folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the saved model predicts for the sentences, by transformers alone."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer()([text for text, _ in SENTENCES], padding=True, return_tensors="pt")
    with torch.inference_mode():
        return model(**inputs).logits.squeeze(-1).double().numpy()


def test_scores_and_predictions_are_the_saved_models(numbers: dict[str, Any], tmp_path: Path) -> None:
    result = fedstrata.run(numbers)
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    found, truth = (np.asarray([line[key] for line in lines]) for key in ("prediction", "label"))
    expected = plainly(tmp_path / "run" / "model")
    assert np.abs(found - expected).max() < 0.1, "around 135 bf16 knows the whole numbers alone"
    assert len(set(found.tolist())) == len(SENTENCES)
    assert result.score["loss"] == pytest.approx(((expected - truth) ** 2).mean(), abs=0.05)


@pytest.mark.parametrize("kind", ["cls", "psum"])
def test_of_every_head(numbers: dict[str, Any], tmp_path: Path, kind: str, job: Job) -> None:
    fedstrata.run({**numbers, "model": job("fedavg", "mlm", 4)["model"], "head": {"kind": kind}})
    lines = (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()
    found = np.asarray([json.loads(line)["prediction"] for line in lines], np.float32)
    as_bf16 = torch.from_numpy(found).bfloat16().float().numpy()
    assert (found != as_bf16).any()


def test_with_noise_and_by_itself(numbers: dict[str, Any], tmp_path: Path) -> None:
    noisy = {"privacy.level": "example", "privacy.noise": 1.0, "output.dir": str(tmp_path / "noisy")}
    fedstrata.run(numbers, noisy)
    working = WorkingModel(tiny_model(head="regress", num_labels=1), find_parts(tiny_model()), "cpu", bf16=True)
    linear = working.model.classifier
    assert type(linear) is NumberLinear
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(torch.ones(2, 32, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.nn.functional.linear(torch.ones(2, 32), linear.weight, linear.bias))
