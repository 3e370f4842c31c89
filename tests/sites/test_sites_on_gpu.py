"""Sites that train on a pretended GPU send what sites on a processor do."""

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


@pytest.mark.parametrize(("name", "tables"), CASES)
def test_sites_on_a_pretended_gpu_come_to_what_they_come_to_on_a_processor(
    job: Callable[..., dict[str, Any]],
    village: Village,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tables: dict[str, Any],
) -> None:
    may = ["weights", "hidden_states", "activations"]
    tables = {**tables, "train": {**PLAIN, **tables.get("train", {})}, "client": {"may_send": may}}
    here, there = village.jobs(job(name, "classify", 3, **tables))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', f"payloads = {may}".replace("'", '"'))
    processor = weights(fedstrata.run(here))
    models = attach(monkeypatch)
    run = fedstrata.run(there)
    assert len(models) == 1 + len(NAMES), "the server's and the sites'"
    assert {model.device for model in models} == {DEVICE}
    assert not json.loads((run.folder / "result.json").read_bytes())["missing"]
    for key, tensor in weights(run).items():
        torch.testing.assert_close(tensor, processor[key], rtol=1e-3, atol=1e-4)
