"""What ``train.precision = "auto"`` takes: a rule on shapes and the processor, recorded and repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.client import precision
from fedstrata.client.precision import LEAST_STATES, LEAST_WIDTH, TYPICAL_TOKENS, batch_tokens, resolve_precision
from fedstrata.client.setup import resolve_jobs
from fedstrata.job.file import load
from fedstrata.job.toml import read_toml

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what torch says of the processor."""

    def have(*features: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))

    return have


def test_bf16_is_for_processors_that_have_it_and_shapes_large_enough(processor: Callable[..., None]) -> None:
    for features in ((), ("avx2", "avx512_f")):
        processor(*features)
        assert resolve_precision("auto", "cpu", 1024, 4096) == "fp32"
    for feature in ("amx_bf16", "avx512_bf16", "bf16"):
        processor(feature)
        assert resolve_precision("auto", "cpu") == "bf16"
        for width in (LEAST_WIDTH, 4 * LEAST_WIDTH):
            assert resolve_precision("auto", "cpu", width, LEAST_STATES // width) == "bf16"
            assert resolve_precision("auto", "cpu", width, LEAST_STATES // width - 1) == "fp32"
        assert resolve_precision("auto", "cpu", LEAST_WIDTH - 1, LEAST_STATES) == "fp32"
        assert resolve_precision("fp32", "cpu", 1024, 4096) == "fp32"
        assert resolve_precision("bf16", "cpu", 32, 16) == "bf16"


@pytest.mark.parametrize(
    ("train", "data", "tokens"),
    [
        ({"batch_size": 8, "max_tokens": 128}, {}, 8 * TYPICAL_TOKENS),
        ({"batch_size": 8, "max_tokens": 16}, {}, 8 * 16),
        ({"batch_size": 8, "max_tokens": 128, "padding": "max"}, {}, 8 * 128),
        ({"batch_size": 8, "max_tokens": 128}, {"long_text": "pack"}, 8 * 128),
    ],
)
def test_tokens_of_a_batch(train: dict[str, Any], data: dict[str, Any], tokens: int, job: Jobs) -> None:
    [made] = load(job("fedavg", "mlm", train=train, data=data))
    assert batch_tokens(made) == tokens


def test_a_stage_takes_the_width_of_the_model_it_starts_from(processor: Callable[..., None]) -> None:
    processor("amx_bf16")
    config = {"model_type": "bert", "hidden_size": LEAST_WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    tables = {
        "data": {"train": "none"},
        "train": {"batch_size": 64},
        "stages": [
            {"name": "one", "task": {"kind": "mlm"}, "model": {"config": config}, "method": {"name": "fedavg"}},
            {"name": "two", "task": {"kind": "mlm"}, "method": {"name": "fedavg"}},
        ],
    }
    assert [made.train.precision for made in resolve_jobs(load(tables), None)] == ["bf16", "bf16"]
    config["hidden_size"] -= 64
    assert [made.train.precision for made in resolve_jobs(load(tables), None)] == ["fp32", "fp32"]


def test_a_run_goes_on_in_the_precision_it_began_with(
    job: Jobs, processor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine "auto" would be something else; then "fp32" in the job itself is refused."""
    monkeypatch.setattr(precision, "LEAST_WIDTH", 1)
    monkeypatch.setattr(precision, "LEAST_STATES", 1)
    processor("amx_bf16")
    made = job("fedavg", "mlm", train={"precision": "auto"}, output={"keep_state": True}, method={"rounds": 1})
    folder = Path(made["output"]["dir"])
    fedstrata.run(made)
    assert read_toml(folder / "job.toml")["train"]["precision"] == "bf16"
    processor()
    made["method"]["rounds"] = 2
    fedstrata.run(made, resume=True)
    assert read_toml(folder / "job.toml")["train"]["precision"] == "bf16"
    made["train"]["precision"] = "fp32"
    with pytest.raises(fedstrata.UserError, match=r"train\.precision = 'bf16'.*'fp32'"):
        fedstrata.run(made, resume=True)


def test_the_reference_page_has_the_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text("utf-8")
    rule = page.partition('precision = "auto"')[2].partition("mlm_head")[0]
    assert all(f"{number:,}" in rule for number in (LEAST_WIDTH, LEAST_STATES, TYPICAL_TOKENS))
