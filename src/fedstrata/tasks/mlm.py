"""Masked language modelling: predict tokens that were hidden (BERT's 15 %: 80 % mask, 10 % random, 10 % kept)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from fedstrata.cost.flops import Positions
from fedstrata.errors import UserError
from fedstrata.nn.mlm import head_at
from fedstrata.tasks import Batch, Examples, padded


@dataclass(frozen=True)
class MaskedLM:
    """The task ``mlm``.

    Attributes:
        mask: id of the mask token.
        padding: id of the padding token.
        special: ids that are never hidden.
        vocabulary: number of ids; random replacements are drawn from all of them.
        probability: share of the positions hidden.
        full_head: compute the head at every position, as the papers do, and not at the hidden ones alone.
    """

    mask: int
    padding: int
    special: npt.NDArray[np.int64]
    vocabulary: int
    probability: float = 0.15
    full_head: bool = False
    kind = "mlm"

    def batch(
        self,
        examples: Examples,
        index: npt.NDArray[np.int64],
        rng: np.random.Generator,
        width: int | None = None,
    ) -> Batch:
        """Hide positions anew at every call; at least one in a batch that has a token to hide."""
        inputs = padded(examples.tokens, index, self.padding, width)
        ids = inputs["input_ids"]
        candidates = inputs["attention_mask"].numpy().astype(bool) & ~np.isin(ids.numpy(), self.special)
        dice = rng.random(ids.shape)
        hidden = candidates & (dice < self.probability)
        if not hidden.any() and candidates.any():
            hidden.flat[np.argmin(np.where(candidates, dice, 2.0))] = True
        kind = rng.random(ids.shape)
        noise = torch.from_numpy(rng.integers(0, self.vocabulary, ids.shape))
        targets = ids[torch.from_numpy(hidden)]
        shown = torch.where(torch.from_numpy(hidden & (kind < 0.8)), self.mask, ids)
        shown = torch.where(torch.from_numpy(hidden & (kind >= 0.9)), noise, shown)
        rows, columns = ids.shape
        predicted = ids.numel() if self.full_head else len(targets)
        return Batch(
            inputs={**inputs, "input_ids": shown},
            targets=targets,
            positions=torch.from_numpy(hidden),
            work=Positions(ids.numel(), rows * columns**2, predicted),
        )

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Scores over the vocabulary at the hidden positions, ``[n, V]``."""
        assert batch.positions is not None
        if self.full_head:
            return model(**batch.inputs).logits[batch.positions]  # type: ignore[no-any-return]
        with head_at(model, batch.positions):
            return model(**batch.inputs).logits[0]  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the hidden positions, in nats."""
        total = functional.cross_entropy(self.logits(model, batch).float(), batch.targets, reduction="sum")
        return total / max(len(batch.targets), 1)  # a batch of unknown tokens alone has nothing to predict

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """``loss`` (nats per hidden token), ``perplexity`` (its exponential), ``accuracy`` of hidden tokens."""
        loss = right = count = 0.0
        for batch in batches:
            logits = self.logits(model, batch).float()
            loss += float(functional.cross_entropy(logits, batch.targets, reduction="sum"))
            right += float((logits.argmax(-1) == batch.targets).sum())
            count += len(batch.targets)
        loss /= max(count, 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": right / max(count, 1)}


def masked_lm(tokenizer: Any, vocabulary: int, probability: float, full_head: bool) -> MaskedLM:
    """The task for a tokenizer.

    Raises:
        UserError: the tokenizer has no mask token.
    """
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
