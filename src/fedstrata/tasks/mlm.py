"""Masked language modeling: predict masked tokens (BERT's 15 %: 80 % mask, 10 % random, 10 % unchanged)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.tasks.batches import Batch, Examples, padded
from fedstrata.tasks.task import TaskContext
from fedstrata.tasks.tokens import TokenTask

SPECIAL = 2
"""Special tokens of an example, which are never masked, where a forecast counts what is."""


@dataclass(frozen=True)
class MaskedLM(TokenTask):
    """The task ``mlm``.

    Attributes:
        mask: id of the mask token.
        padding: id of the padding token.
        special: ids that are never masked.
        vocabulary: number of ids; random replacements are drawn from all of them.
        probability: share of the positions that are masked.
        kind: the task's name in a job file.
    """

    mask: int
    padding: int
    special: Index
    vocabulary: int
    probability: float = 0.15
    kind: str = field(default="mlm", kw_only=True)

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        """Mask positions anew at every call; at least one in a batch that has a token to mask."""
        inputs = padded(examples.tokens, index, self.padding, width)
        ids = inputs["input_ids"]
        candidates = inputs["attention_mask"].numpy().astype(bool) & ~np.isin(ids.numpy(), self.special)
        draw = rng.random(ids.shape)
        masked = candidates & (draw < self.probability)
        if not masked.any() and candidates.any():
            masked.flat[np.argmin(np.where(candidates, draw, 2.0))] = True
        replacement = rng.random(ids.shape)
        noise = torch.from_numpy(rng.integers(0, self.vocabulary, ids.shape))
        targets = ids[torch.from_numpy(masked)]
        shown = torch.where(torch.from_numpy(masked & (replacement < 0.8)), self.mask, ids)
        shown = torch.where(torch.from_numpy(masked & (replacement >= 0.9)), noise, shown)
        rows, columns = ids.shape
        predicted = ids.numel() if self.full_head else len(targets)
        return Batch(
            inputs={**inputs, "input_ids": shown},
            targets=targets,
            positions=torch.from_numpy(masked),
            work=Positions(ids.numel(), rows * columns**2, predicted),
        )

    def has_targets(self, examples: Examples) -> bool:
        """Whether a token may be masked: one that the tokenizer knows, and that is not special."""
        return not np.isin(examples.tokens.ids, self.special).all()

    def head_positions(self, lengths: Index, width: int) -> int:
        """Every position with ``full_head``; else the expected number of masked ones."""
        if self.full_head:
            return len(lengths) * width
        return max(1, round(self.probability * float(np.maximum(lengths - SPECIAL, 0).sum())))


def masked_lm(tokenizer: Any, vocabulary: int, probability: float, full_head: bool) -> MaskedLM:
    """The task for a tokenizer; for none, one that makes no batches.

    Raises:
        UserError: the tokenizer has no mask token.
    """
    if tokenizer is None:
        return MaskedLM(0, 0, np.empty(0, np.int64), vocabulary, probability, full_head=full_head)
    if tokenizer.mask_token_id is None:
        raise UserError("[task] kind: 'mlm' needs a tokenizer with a mask token, and this model's has none")
    return MaskedLM(
        mask=tokenizer.mask_token_id,
        padding=tokenizer.pad_token_id,
        special=np.asarray(sorted(tokenizer.all_special_ids), dtype=np.int64),
        vocabulary=vocabulary,
        probability=probability,
        full_head=full_head,
    )


def build(context: TaskContext) -> MaskedLM:
    """The task of a job: see :func:`masked_lm`."""
    job = context.job
    full_head = job.train.mlm_head == "full"
    task = masked_lm(context.tokenizer, context.vocabulary, job.task.mask_probability, full_head)
    return replace(task, kind=job.task.kind)
