"""Long texts: of the public beside short ones of the client, and longer ones than the span check looks at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.audits import layers
from tiny import SENTENCES, tiny_model, tokenizer, words

Jobs = Callable[..., dict[str, Any]]
RAW = {"optimizer": "sgd", "learning_rate": 1e3, "dropout": False, "steps": 1, "batch_size": 2}
"""One step of SGD at a rate that leaves the gradient whole."""


def model(folder: Path, **changes: Any) -> dict[str, str]:
    """A model whose norms are as after training: what enters its layers may point anywhere."""
    made = tiny_model("bert", "mlm", 2, initializer_range=0.3, **changes)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if "LayerNorm" in name:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=draw))
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return {"name": str(folder)}


def rows(path: Path, texts: list[str]) -> dict[str, str]:
    """A file with these texts, as training and test rows."""
    lines = [f'"{text}",{label}\n' for text, (_, label) in zip(texts, SENTENCES, strict=True)]
    path.write_text("text,label\n" + "".join(lines), "utf-8")
    return {"train": str(path), "test": str(path)}


def spans(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What was read from the layers."""
    return [each for each in record["stages"][0]["findings"] if each["channel"] == "layers"]


@pytest.mark.parametrize("setting", ["1 step, 1 text", "1 step"])
def test_longer_public_texts_do_not_hide_what_a_span_tells(job: Jobs, tmp_path: Path, setting: str) -> None:
    """They fill every direction, so that their own span is not exact."""
    long = tmp_path / "long.csv"
    long.write_text("text\n" + "".join(" ".join(words()[i : i + 30]) + "\n" for i in range(30)), "utf-8")
    data = rows(tmp_path / "short.csv", [" ".join(text.split()[:4]) for text, _ in SENTENCES])
    made = job("fedavg", "classify", train=RAW, data=data, model=model(tmp_path / "trained"))
    record = fedstrata.audit(made, attacks=["layers"], public=str(long))
    [found] = [each for each in spans(record) if each["setting"] == setting]
    assert found["attack"] == "span check"
    read = [found["figures"][n]["value"] for n in ("precision", "recall", "places precision", "places recall")]
    assert read == [1.0] * 4


def test_public_texts_are_as_long_as_the_model_reads(job: Jobs, tmp_path: Path) -> None:
    """As those of a run, where the job leaves train.max_tokens open."""
    long = tmp_path / "long.txt"
    long.write_text("".join(" ".join([*words(), *words()][i : i + 100]) + "\n" for i in range(30)), "utf-8")
    made = job("fedavg", "classify")
    del made["train"]["max_tokens"]
    [stage] = fedstrata.audit(made, attacks=["class_head"], public=str(long))["stages"]
    assert stage["findings"]


@pytest.mark.parametrize("places", [4, 64])
def test_a_text_is_read_exactly_where_all_its_places_are_checked(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public: str, places: int
) -> None:
    monkeypatch.setattr(layers, "PLACES", places)
    made = job("fedavg", "classify", train=RAW, model=model(tmp_path / "trained", hidden_size=64))
    [found, *_] = spans(fedstrata.audit(made, attacks=["layers"], public=public))
    assert found["figures"]["places recall"]["value"] == found["figures"]["places precision"]["value"] == 1.0
    whole = places == 64
    assert ("the text exactly: " in found["sentence"], "exact texts" in found["figures"]) == (whole, whole)
    assert ("at their places, and" if whole else "3 of 3 tokens at the first 4 places, and") in found["sentence"]
