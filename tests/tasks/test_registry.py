"""A task is one entry, one line and one file: this one defines its own, its metric and its partition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedstrata
from fedstrata.data import partition
from fedstrata.data.partition import PartitionInput
from fedstrata.data.tokens import Tokens
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.metrics import Predictions, loss, scores
from fedstrata.job.task_kinds import TASK_KINDS, TaskKind
from fedstrata.plan.kinds import Index
from fedstrata.tasks import TASKS, Batch, Examples, Task, TaskContext, build_task
from fedstrata.tasks.batches import per_example
from tiny import SENTENCES, tokenizer

Jobs = Callable[..., dict[str, Any]]


def surprise(predictions: Predictions) -> float:
    return float(np.exp(predictions.loss)) - 1


@dataclass(frozen=True)
class Soft:
    """Classification with smoothed labels."""

    padding: int
    kind = "soft"
    gathers = False

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        return per_example(examples, index, self.padding, width)

    def head_positions(self, lengths: Index, width: int) -> int:
        return len(lengths)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(**batch.inputs).logits, batch.targets, label_smoothing=0.1)

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        losses = [float(self.loss(model, batch)) for batch in batches]
        empty = np.empty(0)
        return scores(TASK_KINDS[self.kind].metrics, Predictions(empty, empty, float(np.mean(losses))))


def alphabetical(data: PartitionInput) -> dict[str, Index]:
    """Two clients: the labels up to "h", and the others."""
    assert data.labels is not None
    early = np.asarray([label <= "h" for label in data.labels])
    return {"early": np.flatnonzero(early), "late": np.flatnonzero(~early)}


@pytest.fixture
def soft(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TaskKind("class", "AutoModelForSequenceClassification", {"surprise": surprise})
    monkeypatch.setitem(TASK_KINDS, "soft", kind)
    monkeypatch.setitem(TASKS, "soft", lambda context: Soft(context.padding))
    monkeypatch.setitem(partition.PARTITIONS, "alphabetical", alphabetical)


@pytest.mark.usefixtures("soft")
def test_a_task_a_metric_and_a_partition_from_outside(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "soft", clients={"partition": "alphabetical", "count": 2})
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    assert result.score.keys() == {"surprise"}
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    assert forecast["clients"]["train_flops"] == result.flops
    clients = json.loads((tmp_path / "run" / "partition.json").read_text())["clients"]
    assert {name: set(client["labels"]) for name, client in clients.items()} == {
        "early": {"eye"},
        "late": {"heart", "kidney"},
    }
    with pytest.raises(UserError, match=r"\[task\] metric: 'accuracy' is not a metric of 'soft'; .*surprise"):
        load(job("fedavg", "soft", task={"metric": "accuracy"}))


def bits(predictions: Predictions) -> float:
    return predictions.loss / math.log(2)


@pytest.mark.parametrize("base", ["mlm", "clm"])
def test_a_kind_over_a_language_model_s_batches_has_its_own_metrics(
    job: Jobs, model_folder: Callable[..., Path], base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were those of the kind whose batches it has, and the headline was none of the scores."""
    monkeypatch.setitem(TASK_KINDS, "bits", replace(TASK_KINDS[base], metrics={"bits": bits, "loss": loss}))
    monkeypatch.setitem(TASKS, "bits", TASKS[base])
    model = {"name": str(model_folder("gpt2" if base == "clm" else "bert", head=base))}
    result = fedstrata.run(job("fedavg", "bits", model=model, method={"rounds": 1}))
    assert result.score == {
        "bits": pytest.approx(result.score["loss"] / math.log(2)),
        "loss": result.score["loss"],
    }


def test_a_kind_that_masks_tokens_has_the_keys_of_one(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASK_KINDS, "bits", TASK_KINDS["mlm"])
    monkeypatch.setitem(TASKS, "bits", TASKS["mlm"])
    notes: list[str] = []
    made = job("fedavg", "bits", task={"mask_probability": 0.3}, train={"mlm_head": "full"})
    fedstrata.run(made, progress=lambda event: notes.extend(getattr(event, "notes", ())))
    assert notes
    assert not any("no effect" in note for note in notes)
    with pytest.raises(UserError, match=r"cache_frozen_layers: goes with inputs .*; 'bits' draws new masks each"):
        load(job("fedbt", "bits", train={"cache_frozen_layers": True, "epochs": 2}))


def test_what_is_not_registered_is_refused(job: Jobs) -> None:
    with pytest.raises(UserError, match=r"\[task\] kind: 'soft' is invalid; expected one of: mlm, clm, classify"):
        load(job("fedavg", "soft"))
    with pytest.raises(UserError, match=r"\[clients\] partition: 'iidd' is invalid; did you mean 'iid'\?"):
        fedstrata.run(job("fedavg", "mlm", clients={"partition": "iidd"}))
    with pytest.raises(UserError, match=r"\[clients\] partition: 'zzz' is invalid; expected one of: iid, dir"):
        fedstrata.forecast(job("fedavg", "mlm", data={"train": "-"}, clients={"partition": "zzz"}))
    with pytest.raises(UserError, match=r"\[clients\] partition: 'skewed' is now 'quantity_skew'"):
        load(job("fedavg", "mlm", clients={"partition": "skewed"}))


def test_every_kind_has_a_task_and_metrics() -> None:
    assert TASKS.keys() == TASK_KINDS.keys()
    for kind in TASK_KINDS.values():
        assert kind.metrics
        assert kind.labeled == (kind.target != "token")
        assert not kind.classes or kind.labeled


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", TASK_KINDS)
def test_the_head_s_positions_are_told_before_a_batch_is_made(job: Jobs, name: str, full: bool) -> None:
    """Exactly, but for masked positions, of which it is the expected number; with or without a tokenizer."""
    made = job("fedavg", name, train={"mlm_head": "full" if full else "masked"})
    if name == "pair":
        made["data"]["text"] = ["text", "text"]
    [resolved] = load(made)
    tokens = [tokenizer()(text)["input_ids"] for text, _ in SENTENCES]
    lengths = np.asarray([len(ids) for ids in tokens])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    kind = TASK_KINDS[name]
    labels = np.zeros(int(offsets[-1]) if kind.target == "tag" else len(tokens), np.int64)
    examples = Examples(
        Tokens(np.concatenate(tokens).astype(np.int32), offsets, np.arange(len(tokens))),
        labels if kind.labeled else None,
    )
    names = ("eye", "heart") if kind.classes else None
    task: Task = build_task(TaskContext(resolved, names, tokenizer(), 68))
    forecast = build_task(TaskContext(resolved, names))
    index = np.arange(len(tokens))
    width = int(lengths.max())
    expected = task.head_positions(lengths, width)
    assert forecast.head_positions(lengths, width) == expected
    assert (forecast.kind, forecast.gathers) == (task.kind, task.gathers) == (name, task.gathers)
    rng = np.random.default_rng(0)
    found = [task.batch(examples, index, rng).work.predicted for _ in range(200)]
    if name == "mlm" and not full:
        assert np.mean(found) == pytest.approx(expected, rel=0.03)
    else:
        assert set(found) == {expected}
    assert task.gathers == (kind.target == "token" and not (name == "mlm" and full))
