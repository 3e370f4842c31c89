"""What is left out of messages, with noise and masked sums: neither noised nor counted nor summed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import NAMES, Village
from test_omit import BIAS, POSITIONS, TABLE, frozen_rows

import fedstrata
from fedstrata.client import private
from fedstrata.client.noisy_steps import NoisySteps
from fedstrata.privacy.fixed_point import STEP
from fedstrata.privacy.noise import norm_of
from tiny import saved_tensors

Jobs = Callable[..., dict[str, Any]]
OMIT = ["decoder_bias", "position_rows", "unlisted_rows"]
LEVELS: dict[str, dict[str, Any]] = {
    "sums": {"sum_only": True},
    "example": {"level": "example", "clip": 0.5, "noise": 0.8},
    "client": {"level": "client", "clip": 0.5, "noise": 0.05, "single_message": True},
    "client, sums": {"level": "client", "clip": 0.125, "noise": 2.0, "sum_only": True, "honest": 3},
}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "public.txt"
    path.write_text("the\nkidney\nheart\nof a\n", "utf-8")
    return path


def job_of(job: Jobs, level: str, vocabulary: Path, omit: list[str] = OMIT, **tables: Any) -> dict[str, Any]:
    table = {**LEVELS[level], "omit": omit}
    if "unlisted_rows" in omit:
        table["public_vocabulary"] = str(vocabulary)
    return job("fedavg", "mlm", 2, privacy=table, **tables)


def assert_stays(config: dict[str, Any], before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """What is omitted is the start model's, to the bit; what is not has moved."""
    rows = frozen_rows(config)
    listed = [row for row in range(len(before[TABLE])) if row not in rows]
    for name in (BIAS, POSITIONS):
        assert torch.equal(before[name], after[name]), name
    assert torch.equal(before[TABLE][rows], after[TABLE][rows])
    assert not torch.equal(before[TABLE][listed], after[TABLE][listed])


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_omitted_stays_and_costs_are_as_forecast(
    job: Jobs, tmp_path: Path, vocabulary: Path, level: str
) -> None:
    config = job_of(job, level, vocabulary)
    [costs] = fedstrata.forecast(config).values()
    run = fedstrata.run(config)
    assert_stays(config, saved_tensors(Path(config["model"]["name"])), saved_tensors(run.folder / "model"))
    assert run.bytes["up"] == costs["clients"]["up_bytes"]
    assert run.bytes["down"] == costs["clients"]["down_bytes"]
    assert run.privacy == costs["privacy"]
    [whole] = fedstrata.forecast({**config, "privacy": LEVELS[level]}).values()
    rows = frozen_rows(config)
    tensors = saved_tensors(run.folder / "model")
    gone = len(tensors[BIAS]) + tensors[POSITIONS].numel() + len(rows) * tensors[TABLE].shape[1]
    width = costs["sums"]["bytes_per_number"] if "sums" in level else 4
    assert whole["clients"]["up_bytes"] - costs["clients"]["up_bytes"] == 3 * 2 * gone * width
    if run.privacy:
        assert (
            run.privacy["epsilon"] == whole["privacy"]["epsilon"]
        )  # per example and message, whatever is in them


def test_a_sum_of_what_travels_is_the_mean_to_half_a_step(job: Jobs, tmp_path: Path, vocabulary: Path) -> None:
    config = job_of(job, "sums", vocabulary, method={"rounds": 1})
    other = {**config, "privacy": {**config["privacy"], "sum_only": False}, "output": {"dir": str(tmp_path / "b")}}
    first, second = (saved_tensors(fedstrata.run(made).folder / "model") for made in (config, other))
    for name, tensor in second.items():
        ulp = torch.nextafter(tensor.abs(), torch.tensor(float("inf"))) - tensor.abs()
        assert ((tensor - first[name]).abs() <= STEP / 2 + 2 * ulp).all(), name


@pytest.mark.parametrize("level", ["client", "client, sums"])
def test_only_what_travels_is_clipped_and_noised(
    job: Jobs, vocabulary: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """A message has as many numbers before the noise as it has on its way."""
    config = job_of(job, level, vocabulary, method={"rounds": 1})
    clipped: list[int] = []
    privatized, summands = private.privatized, private.Private.summands

    def one(sent: Any, start: Any, *more: Any) -> Any:
        clipped.append(sum(tensor.numel() for own in sent.values() for tensor in own.values()))
        return privatized(sent, start, *more)

    def summed(self: Any, changes: Any, *more: Any) -> Any:
        clipped.append(sum(map(len, changes.values())))
        return summands(self, changes, *more)

    monkeypatch.setattr(private, "privatized", one)
    if level == "client, sums":
        monkeypatch.setattr(private.Private, "summands", summed)
    run = fedstrata.run(config)
    tensors = saved_tensors(run.folder / "model")
    gone = len(tensors[BIAS]) + tensors[POSITIONS].numel() + len(frozen_rows(config)) * tensors[TABLE].shape[1]
    assert clipped == [sum(tensor.numel() for tensor in tensors.values()) - gone] * 3


def test_rows_that_stay_take_nothing_of_an_examples_clip(
    job: Jobs, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of an example, longer than the clip, is as long as the clip without them."""
    found: list[float] = []
    add_clipped = NoisySteps._add_clipped

    def noted(self: Any, total: dict[str, torch.Tensor], *more: Any) -> torch.Tensor:
        own = {name: torch.zeros_like(tensor) for name, tensor in total.items()}
        loss = add_clipped(self, own, *more)
        assert not own[TABLE][self.still[TABLE]].any()
        found.append(norm_of(own.values()))
        for name, tensor in own.items():
            total[name] += tensor
        return loss

    monkeypatch.setattr(NoisySteps, "_add_clipped", noted)
    config = job_of(job, "example", vocabulary, ["unlisted_rows"], train={"batch_size": 1})
    config["privacy"]["clip"] = 1e-3
    fedstrata.run(config)
    assert len(found) > 3
    assert found == pytest.approx([1e-3] * len(found), rel=1e-3)


@pytest.mark.parametrize("level", ["example", "client", "client, sums"])
def test_parts_in_turns_spend_what_whole_messages_do(job: Jobs, vocabulary: Path, level: str) -> None:
    """A change that stands for several rounds is clipped and noised as any other."""
    config = job_of(job, level, vocabulary, ["decoder_bias"], method={"rounds": 3})
    [whole] = fedstrata.forecast(config).values()
    config["wire"] = {"part_period": 2}
    [costs] = fedstrata.forecast(config).values()
    run = fedstrata.run(config)
    assert (run.bytes["up"], run.bytes["down"]) == tuple(costs["clients"][f"{w}_bytes"] for w in ("up", "down"))
    assert costs["clients"]["up_bytes"] < whole["clients"]["up_bytes"]
    assert run.privacy == costs["privacy"] == whole["privacy"]


def test_between_sites(job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: Path) -> None:
    """Noise comes from the sites' own secrets, so the bits differ; what stays, bytes and epsilon do not."""
    village = Village(tmp_path, monkeypatch)
    for site in NAMES:
        village.site(site, "[require]", "[require]\nhonest = 3\nsum_only = true")
    here, there = village.jobs(job_of(job, "client, sums", vocabulary))
    [costs] = fedstrata.forecast(here).values()
    run = fedstrata.run(there)
    assert_stays(here, saved_tensors(Path(here["model"]["name"])), saved_tensors(run.folder / "model"))
    assert run.bytes["up"] == costs["clients"]["up_bytes"]
    assert run.privacy is not None
    assert run.privacy["epsilon"] == costs["privacy"]["epsilon"]
