"""Sites that train on a GPU, or on a pretended one, send what sites on a processor do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_in_memory import NAMES, Village, weights
from test_in_memory import village as village  # a fixture

import fedstrata
from pretend_device import DEVICE, attach

PLAIN = {"optimizer": "sgd", "learning_rate": 0.05, "dropout": False}
"""SGD: Adam's first steps take the signs of gradients, which rounding may turn."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedsplitbert", {"clients": {"test": 0.3}, "wire": {"dtype": "int8"}}),
    ("fedfreezebert", {"head": {"kind": "mean"}, "method": {"variant": "centralized"}}),
    (
        "fedbert",
        {
            "method": {"mode": "share"},
            "wire": {"activations": "int4", "gradients": "fp16", "activations_changed": 0.0},
            "train": {"epochs": 2},
        },
    ),
]
Jobs = Callable[..., dict[str, Any]]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def prepared(
    job: Jobs, village: Village, name: str, tables: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case's job on this machine, and between sites that may send all it asks for."""
    may = ["weights", "hidden_states", "activations"]
    tables = {**tables, "train": {**PLAIN, **tables.get("train", {})}, "client": {"may_send": may}}
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', f"payloads = {may}".replace("'", '"'))
    return village.jobs(job(name, "classify", 3, **tables))


def assert_close(run: Any, processor: dict[str, torch.Tensor]) -> None:
    """No site was missing, and the weights are those."""
    assert not json.loads((run.folder / "result.json").read_bytes())["missing"]
    for key, tensor in weights(run).items():
        torch.testing.assert_close(tensor, processor[key], rtol=1e-3, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize(("name", "tables"), CASES)
def test_sites_on_a_gpu_come_to_what_they_come_to_on_a_processor(
    job: Jobs, village: Village, caplog: pytest.LogCaptureFixture, name: str, tables: dict[str, Any]
) -> None:
    here, there = prepared(job, village, name, tables)
    processor = weights(fedstrata.run(here))
    there["train"]["device"] = "cuda"  # the server's
    with caplog.at_level("INFO"):
        run = fedstrata.run(there)
    assert caplog.text.count("computes on a GPU, ") == len(NAMES)
    assert_close(run, processor)


@pytest.mark.parametrize(("name", "tables"), CASES)
def test_sites_on_a_pretended_gpu_come_to_what_they_come_to_on_a_processor(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, name: str, tables: dict[str, Any]
) -> None:
    here, there = prepared(job, village, name, tables)
    processor = weights(fedstrata.run(here))
    models = attach(monkeypatch)
    run = fedstrata.run(there)
    assert len(models) == 1 + len(NAMES), "the server's and the sites'"
    assert {model.device for model in models} == {DEVICE}
    assert_close(run, processor)
