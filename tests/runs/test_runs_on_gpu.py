"""Whole runs on a GPU come to what they come to on a processor; so they do on one that is pretended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.events import Scored
from fedstrata.methods import METHODS
from pretend_device import DEVICE, attach
from tiny import saved_models, words

GPU = "cuda"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Jobs = Callable[..., dict[str, Any]]
PLAIN: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "dropout": False, "steps": 3}
"""SGD: Adam's first steps take the signs of gradients, which rounding may turn."""
STILL = {"train.learning_rate": 1e-12}
"""Shows how far a run has moved the start model."""
CLOSE = 0.02
"""How far two runs may be apart, relative to how far they have moved: codecs may round to the other side."""
NEAR = 1e-3
"""The same where the GPU is pretended, on whose processor only attention is computed otherwise."""
LABELS = {"labels": ["eye", "heart", "kidney"]}
EXAMPLE = {"level": "example", "clip": 0.5, "noise": 0.5}
SMALL = {"batch_size": 1}
CLIENT = {**EXAMPLE, "level": "client", "single_message": True}
SPLIT = ("fedbert", "mlm")
Case = tuple[str, str, dict[str, Any]]
CASES: dict[str, Case] = {
    **{name: (name, "classify", {}) for name in METHODS if name not in ("fedbfpt", "none")},
    "fedbfpt": ("fedbfpt", "mlm", {}),
    "fedbt, mlm": ("fedbt", "mlm", {}),
    "hidden states": ("fedfreezebert", "classify", {"method": {"variant": "centralized", "head": "mean"}}),
    "whole head": ("fedavg", "mlm", {"train": {"mlm_head": "full"}}),
    "clipped": ("fedprox", "mlm", {"train": {"max_grad_norm": 0.1, "proximal_mu": 0.1}}),
    "kept states": ("fedbt", "classify", {"train": {"cache_frozen_layers": True, "epochs": 2}}),
    "unlisted rows": ("fedavg", "mlm", {"privacy": {"omit": ["unlisted_rows"]}}),
    "in turns": ("fedavg", "classify", {"wire": {"part_period": 2}}),
    "adapters": ("fedavg", "classify", {"adapter": {"kind": "lora", "rank": 2}}),
    "adapters, exact": ("fedavg", "classify", {"adapter": {"kind": "lora", "rank": 2, "merge": "exact"}}),
    "int8": ("fedavg", "classify", {"wire": {"dtype": "int8"}}),
    "one bit": ("fedavg", "classify", {"wire": {"codec": "delta", "bits": 1}}),
    "activations of 4 bits": (*SPLIT, {"wire": {"activations": "int4", "gradients": "int4"}}),
    "some channels": (*SPLIT, {"wire": {"activations_density": 0.5}}),
    "what changed": (*SPLIT, {"wire": {"activations_changed": 0.0}, "train": {"epochs": 2}}),
    "sums": ("fedavg", "classify", {"privacy": {"sum_only": True}}),
    "example": ("fedavg", "classify", {"task": LABELS, "privacy": EXAMPLE}),
    "example, steps of none": ("fedavg", "classify", {"task": LABELS, "privacy": EXAMPLE, "train": SMALL}),
    "example, masked words": ("fedavg", "mlm", {"privacy": EXAMPLE}),
    "example, unlisted rows": ("fedavg", "mlm", {"privacy": {**EXAMPLE, "omit": ["unlisted_rows"]}}),
    "client": ("fedavg", "classify", {"task": LABELS, "privacy": CLIENT}),
}
ALIKE = {"fedavgm", "fedadam", "fedyogi", "fedadagrad", "centralized", "single", "local"}
ALIKE |= {"fedbt, mlm", "whole head", "adapters, exact", "example, masked words"}
"""Cases in which a GPU does nothing that it does not in another."""
PRETENDED = [case for case in CASES if case not in ALIKE]


def made(job: Jobs, folder: Path, name: str, kind: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    """A case's job."""
    if "omit" in (table := dict(tables.get("privacy", {}))):
        (folder / "listed.txt").write_text("\n".join(words()[::2]), "utf-8")
        table["public_vocabulary"] = str(folder / "listed.txt")
    tables = {**tables, "privacy": table, "train": {**PLAIN, **tables.get("train", {})}}
    return job(name, kind, 4, **tables, client={"may_send": ["weights", "hidden_states", "activations"]})


def trained(made: dict[str, Any], folder: Path, device: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """All tensors of the models that a run saves."""
    fedstrata.run(made, {"output.dir": str(folder), "train.device": device, **overrides})
    return saved_models(folder)


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Between the models of two runs: the norm over all tensors."""
    assert one.keys() == other.keys()
    assert one
    return float(torch.stack([(t.double() - other[name].double()).norm() for name, t in one.items()]).norm())


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_comes_to_what_a_processor_does(job: Jobs, tmp_path: Path, case: str) -> None:
    config = made(job, tmp_path, *CASES[case])
    cpu = trained(config, tmp_path / "cpu", "cpu")
    gpu = trained(config, tmp_path / "gpu", GPU)
    moved = distance(cpu, trained(config, tmp_path / "still", "cpu", **STILL))
    assert moved > 0
    assert distance(gpu, cpu) < CLOSE * moved


@needs_gpu
def test_bf16_on_a_gpu_is_near_fp32(job: Jobs, tmp_path: Path) -> None:
    config = made(job, tmp_path, "fedavg", "mlm", {})
    whole = trained(config, tmp_path / "fp32", GPU)
    half = trained(config, tmp_path / "bf16", GPU, **{"train.precision": "bf16"})
    moved = distance(whole, trained(config, tmp_path / "still", GPU, **STILL))
    assert 0 < distance(half, whole) < 0.3 * moved


@needs_gpu
def test_workers_share_a_gpu(job: Jobs, tmp_path: Path) -> None:
    config = made(job, tmp_path, "fedavg", "classify", {})
    alone = trained(config, tmp_path / "alone", GPU, **{"engine.name": "inprocess"})
    workers = trained(config, tmp_path / "workers", GPU, **{"engine.name": "pool", "engine.workers": 2})
    moved = distance(alone, trained(config, tmp_path / "still", GPU, **STILL))
    assert distance(workers, alone) < CLOSE * moved


@needs_gpu
def test_a_run_on_a_gpu_goes_on(job: Jobs, tmp_path: Path) -> None:
    """With the optimizer's memory, residuals of a codec and dropout."""
    train = {"train": {"optimizer_state": "persist", "dropout": True}}
    config = made(job, tmp_path, "fedavg", "classify", {**train, "wire": {"codec": "delta", "bits": 4}})
    whole = trained(config, tmp_path / "whole", GPU)
    moved = distance(whole, trained(config, tmp_path / "still", GPU, **STILL))
    config["output"] = {"dir": str(tmp_path / "stopped")}
    config["train"]["device"] = GPU

    def stop(event: Any) -> None:
        if isinstance(event, Scored) and event.round == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(config, progress=stop)
    fedstrata.run(config, resume=True)
    assert distance(saved_models(tmp_path / "stopped"), whole) < CLOSE * moved


@pytest.mark.parametrize("case", PRETENDED)
def test_a_pretended_gpu_comes_to_what_a_processor_does(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config = made(job, tmp_path, *CASES[case])
    cpu = trained(config, tmp_path / "cpu", "cpu")
    moved = distance(cpu, trained(config, tmp_path / "still", "cpu", **STILL, **{"method.rounds": 1}))
    models = attach(monkeypatch)
    pretended = trained(config, tmp_path / "pretended", "cpu")
    assert [model.device for model in models] == [DEVICE]
    assert moved > 0
    assert distance(pretended, cpu) < NEAR * moved
