"""Causal language modeling: predict every token from those before it, as GPT does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.tasks.batches import Batch, Examples, padded
from fedstrata.tasks.task import TaskContext
from fedstrata.tasks.tokens import TokenTask


@dataclass(frozen=True)
class CausalLM(TokenTask):
    """The task ``clm``.

    Attributes:
        padding: id of the padding token; it may be a word's as well, since the mask says what is padding.
        kind: the task's name in a job file.
    """

    padding: int
    kind: str = field(default="clm", kw_only=True)

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        """Pad the examples; each token but an example's first is predicted; ``rng`` is not used."""
        inputs = padded(examples.tokens, index, self.padding, width)
        ids = inputs["input_ids"]
        positions = torch.zeros_like(ids, dtype=torch.bool)
        positions[:, :-1] = inputs["attention_mask"][:, 1:].bool()
        targets = ids.roll(-1, 1)[positions]
        rows, columns = ids.shape
        work = Positions(ids.numel(), rows * columns**2, len(targets))
        return Batch(inputs, targets, positions, work)

    def has_targets(self, examples: Examples) -> bool:
        """Whether a token follows another."""
        return bool((examples.tokens.lengths > 1).any())

    def head_positions(self, lengths: Index, width: int) -> int:
        """One per token but each example's first."""
        return int((lengths - 1).sum())


def build(context: TaskContext) -> CausalLM:
    """The task of a job."""
    return CausalLM(context.padding, kind=context.job.task.kind)
