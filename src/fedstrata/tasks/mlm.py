"""Masked language modeling: predict tokens that were hidden (BERT's 15 %: 80 % mask, 10 % random, 10 % kept)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstrata.errors import UserError
from fedstrata.plan.messages import Positions
from fedstrata.tasks import Batch, Examples, padded
from fedstrata.tasks.tokens import TokenTask


@dataclass(frozen=True)
class MaskedLM(TokenTask):
    """The task ``mlm``.

    Attributes:
        mask: id of the mask token.
        padding: id of the padding token.
        special: ids that are never hidden.
        vocabulary: number of ids; random replacements are drawn from all of them.
        probability: share of the positions hidden.
    """

    mask: int
    padding: int
    special: npt.NDArray[np.int64]
    vocabulary: int
    probability: float = 0.15
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
