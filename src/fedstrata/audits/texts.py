"""How much of the texts a reader of hidden states gets right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Figure, mean, rouge_l, share
from fedstrata.plan.kinds import Index

TEXTS = 200
"""Texts whose ROUGE-L is computed, the first ones."""


@dataclass(frozen=True)
class States:
    """Hidden states of texts, one for each token.

    Attributes:
        rows: ``[N, H]`` fp32.
        tokens: the true token ids, as the model saw them, ``[N]``.
        places: position of each in its text, ``[N]``.
        lengths: tokens of each text, ``[m]``.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    lengths: Index

    def first(self, texts: int) -> States:
        """The states of the first texts."""
        end = int(self.lengths[:texts].sum())
        return States(self.rows[:end], self.tokens[:end], self.places[:end], self.lengths[:texts])


def places_of(lengths: Index) -> torch.Tensor:
    """The position of every token in its text, ``[N]``."""
    return torch.from_numpy(np.concatenate([np.arange(n) for n in lengths] or [np.empty(0, np.int64)]))


def scored(bench: Bench, states: States, read: torch.Tensor) -> dict[str, Figure]:
    """The share of tokens read right, special ones left out, and ROUGE-L of whole texts.

    Chance is what naming the commonest token of the public text at every place would give.
    """
    ordinary = torch.from_numpy(bench.ordinary)[states.tokens]
    right = (read == states.tokens) & ordinary
    commonest = int(bench.frequencies.argmax())
    chance = float(((states.tokens == commonest) & ordinary).sum() / ordinary.sum().clamp_min(1))
    ends = np.cumsum(states.lengths)[:TEXTS]
    spans = list(zip(ends - states.lengths[:TEXTS], ends, strict=True))
    fit = [rouge_l(_words(bench, read[a:b]), _words(bench, states.tokens[a:b])) for a, b in spans]
    usual = [rouge_l([commonest] * int(b - a), _words(bench, states.tokens[a:b])) for a, b in spans]
    return {
        "tokens": share(int(right.sum()), int(ordinary.sum()), chance),
        "ROUGE-L": mean(fit, float(np.mean(usual)) if usual else None),
    }


def _words(bench: Bench, tokens: torch.Tensor) -> list[int]:
    return [token for token in tokens.tolist() if bench.ordinary[token]]
