"""Examples, and the batches that a model is given of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstrata.data.tokens import Tokens
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions

IGNORE_INDEX = -100
"""The class of a token that is not the first piece of a word; cross-entropy ignores it."""


@dataclass(frozen=True)
class Examples:
    """Tokenized rows with their labels.

    Attributes:
        tokens: the examples' token ids.
        labels: class index of each example, ``[n]`` int64, or for ``tag`` of each token; for ``regress`` each
            example's number, float64; None without labels.
        pools: name of a source -> its examples, which are scored apart as well.
        numbers: of each example its row's place in its source, dropped rows counted, ``[n]``; None where it is not
            known.
    """

    tokens: Tokens
    labels: npt.NDArray[Any] | None = None
    pools: Mapping[str, Index] = field(default_factory=dict)
    numbers: Index | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """What one step sees.

    Attributes:
        inputs: ``input_ids``, ``attention_mask`` and for pairs ``token_type_ids``, each ``[B, S]``.
        targets: class of each prediction, ``[n]``: of each example, or of each predicted token; for ``tag``
            ``[B, S]``; for ``regress`` the number of each example.
        positions: where the head predicts a token, bool ``[B, S]``, or the indices of these places, which are what
            a GPU takes without waiting; None for one prediction per example.
        work: positions computed with, for the FLOP count.
        origin: of each example its row and its number, ``[B, 2]`` int64; of a task that scores whole rows.
    """

    inputs: dict[str, torch.Tensor]
    targets: torch.Tensor
    positions: torch.Tensor | tuple[torch.Tensor, ...] | None = None
    work: Positions = field(default_factory=Positions)
    origin: Index | None = None

    @property
    def predictions(self) -> int:
        """Predictions that the batch's loss is the mean of."""
        if self.targets.ndim == 1:
            return len(self.targets)
        return int((self.targets != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; copies to a GPU go on beside what it computes."""
        if device.type == "cpu":
            return self
        inputs = {name: _copied(tensor, device) for name, tensor in self.inputs.items()}
        positions = self.positions
        if isinstance(positions, torch.Tensor):
            positions = positions.nonzero(as_tuple=True)
        if positions is not None:
            positions = tuple(_copied(index, device) for index in positions)
        return replace(self, inputs=inputs, targets=_copied(self.targets, device), positions=positions)


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def pad(sequences: Sequence[npt.NDArray[np.integer[Any]]], value: int, width: int | None = None) -> torch.Tensor:
    """Sequences of token ids as one tensor ``[B, S]`` (int64), filled up on the right with ``value``.

    Args:
        sequences: ids of each example.
        value: the padding id.
        width: ``S``; the longest sequence when absent.
    """
    ids = np.full((len(sequences), width or max(map(len, sequences))), value, dtype=np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(ids)


def padded(tokens: Tokens, index: Index, value: int, width: int | None = None) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and for pairs ``token_type_ids``, each ``[B, S]``, of chosen examples.

    Args:
        tokens: all examples.
        index: which of them to take, ``[B]``.
        value: the padding id.
        width: ``S``; the longest example's length when None.
    """
    ids = pad([tokens[i] for i in index], value, width)
    lengths = torch.from_numpy(tokens.offsets[index + 1] - tokens.offsets[index])
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
    if len(tokens.types):
        types = [tokens.types[tokens.offsets[i] : tokens.offsets[i + 1]] for i in index]
        inputs["token_type_ids"] = pad(types, 0, ids.shape[1])
    return inputs


def per_example(examples: Examples, index: Index, padding: int, width: int | None = None) -> Batch:
    """A batch with one label and one prediction per example; arguments as :func:`padded`."""
    assert examples.labels is not None
    inputs = padded(examples.tokens, index, padding, width)
    rows, columns = inputs["input_ids"].shape
    work = Positions(rows * columns, rows * columns**2, rows)
    return Batch(inputs, torch.from_numpy(examples.labels[index]), work=work)


def ids_of(examples: Examples, index: Index, padding: int) -> Index:
    """The token ids of chosen examples and of padding, each once, in rising order."""
    return np.unique(np.concatenate([*(examples.tokens[i] for i in index), [padding]]))


def branches(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The logits of every branch of the model's head, ``[branches, B, C]`` fp32; most models have one."""
    output = model(**batch.inputs)
    logits: torch.Tensor = output.branches.transpose(0, 1) if "branches" in output else output.logits[None]
    return logits.float()
