"""Tasks: what is learnt. Each turns examples into batches, batches into a loss, and predictions into scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstrata.data.batching import pad
from fedstrata.data.tokens import Tokens
from fedstrata.plan.messages import Positions

LANGUAGE = ("mlm", "clm")
"""Task kinds that learn from plain text: pre-training."""


@dataclass(frozen=True)
class Examples:
    """Tokenized rows with their labels.

    Attributes:
        tokens: the examples' token ids.
        labels: class index of each example, ``[n]`` int64, or for ``tag`` of each token; for ``regress`` each
            example's number, float64; None without labels.
        pools: name of a source -> its examples, which are scored apart as well.
    """

    tokens: Tokens
    labels: npt.NDArray[Any] | None = None
    pools: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """What one step sees.

    Attributes:
        inputs: ``input_ids``, ``attention_mask`` and for pairs ``token_type_ids``, each ``[B, S]``.
        targets: class of each prediction, ``[n]``: of each example, or of each predicted token; for ``tag``
            ``[B, S]``; for ``regress`` the number of each example.
        positions: where the head predicts a token, bool ``[B, S]``; None for one prediction per example.
        work: positions computed with, for the FLOP count.
    """

    inputs: dict[str, torch.Tensor]
    targets: torch.Tensor
    positions: torch.Tensor | None = None
    work: Positions = field(default_factory=Positions)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(inputs, self.targets.to(device), positions, self.work)


def padded(
    tokens: Tokens, index: npt.NDArray[np.int64], value: int, width: int | None = None
) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and for pairs ``token_type_ids``, each ``[B, S]``, of chosen examples.

    Args:
        tokens: all examples.
        index: which of them to take, ``[B]``.
        value: the padding id.
        width: ``S``; the longest example's length when None.
    """
    ids = pad([tokens[i] for i in index], value, width)
    lengths = torch.from_numpy(tokens.offsets[index + 1] - tokens.offsets[index])
    made = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
    if len(tokens.types):
        types = [tokens.types[tokens.offsets[i] : tokens.offsets[i + 1]] for i in index]
        made["token_type_ids"] = pad(types, 0, ids.shape[1])
    return made


def per_example(examples: Examples, index: npt.NDArray[np.int64], padding: int, width: int | None = None) -> Batch:
    """A batch with one label and one prediction per example; arguments as :func:`padded`."""
    assert examples.labels is not None
    inputs = padded(examples.tokens, index, padding, width)
    rows, columns = inputs["input_ids"].shape
    work = Positions(rows * columns, rows * columns**2, rows)
    return Batch(inputs, torch.from_numpy(examples.labels[index]), work=work)


def branches(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The logits of every branch of the model's head, ``[branches, B, C]`` fp32; most models have one."""
    output = model(**batch.inputs)
    logits: torch.Tensor = output.branches if "branches" in output else output.logits[None]
    return logits.float()


class Task(Protocol):
    """The five things a task knows."""

    @property
    def kind(self) -> str:
        """The task's word in a job file."""

    def batch(
        self,
        examples: Examples,
        index: npt.NDArray[np.int64],
        rng: np.random.Generator,
        width: int | None = None,
    ) -> Batch:
        """The examples at ``index`` as a batch of ``width`` tokens (the longest example's when None)."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss over the batch's predictions, a scalar with a graph."""

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Every metric of the task over all batches; sums are over predictions, not batches."""
