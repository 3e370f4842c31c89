"""Which of some texts a message was trained on: its change as a sum of the texts' own gradients.

A step moves what is sent along the gradients of its texts, and whoever has the model can compute the gradient of
any text. A ridge regression of the change on the gradients of all texts in question says how much of each it has.
Texts of one class have gradients that are much alike: the regression gives each no more than the others leave,
where the product of the change with a single gradient tells little but the class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Floats, Truth
from fedstrata.audits.finding import Finding
from fedstrata.audits.membership import Pool, found_in
from fedstrata.audits.play import Played, flat
from fedstrata.audits.short_training import SHORT, ShortTrainings
from fedstrata.errors import plural

NUMBERS = 1 << 17
"""Most numbers of a gradient that are looked at, drawn from all; rows of embeddings are read otherwise."""
RIDGE = 0.1
"""Of the square of a gradient, whose length is 1."""
ATTACK = "gradients of the texts"
"""What the findings call it."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of some texts in the client's start model, by what is sent.

    Attributes:
        names: of the tensors.
        picked: which numbers of these, put one after the other, are looked at.
        rows: the gradients, each of length 1, ``[n, k]``.
    """

    names: tuple[str, ...]
    picked: torch.Tensor
    rows: torch.Tensor

    def scores(self, played: Played) -> Floats:
        """How much of each text is in a message, ``[n]``."""
        before, after = flat(played.before), flat(played.after)
        change = _joined([before[name] - after[name] for name in self.names], self.picked)
        square = (self.rows @ self.rows.T).double()
        square += RIDGE * torch.eye(len(square), dtype=torch.float64)
        found: Floats = torch.linalg.solve(square, (self.rows @ change).double()).numpy()
        return found


def attack(trainings: ShortTrainings, pool: Pool, target: Played, inside: Truth) -> list[Finding]:
    """The texts of one step, and those of a whole training, from what is sent after it.

    Args:
        trainings: makes the step.
        pool: the texts in question.
        target: the training.
        inside: which texts it and the step draw from, ``[n]``.
    """
    bench, found = trainings.bench, []
    gradients = gradients_of(bench, pool, target)
    if not gradients.names:
        return []
    step = trainings.train("membership, 1 step", pool.examples, np.flatnonzero(inside), 1)
    for played in (step, target):
        used = np.zeros(len(inside), dtype=bool)
        for seen in played.seen:
            used[seen.index] = True
        if used.any():  # at level "example" perhaps nobody was drawn
            scores = {ATTACK: gradients.scores(played)}
            found += found_in(bench, SHORT, plural(played.reply.steps, "step"), scores, used)
    return found


def gradients_of(bench: Bench, pool: Pool, played: Played) -> Gradients:
    """The gradients of a pool's texts by what a message holds; without names where it holds embeddings alone."""
    tables = {name for part in bench.parts.each if part.kind == "embeddings" for name in part.shapes}
    with bench.model() as model, torch.enable_grad():
        every = dict(model.named_parameters())
        names = tuple(name for name in flat(played.after) if name in every and name not in tables)
        chosen = [every[name] for name in names]
        total, task = sum(p.numel() for p in chosen), bench.ready.runtime.trainer.task
        draw = torch.Generator().manual_seed(0)
        picked = torch.randint(total, (NUMBERS,), generator=draw) if total > NUMBERS else torch.arange(total)
        was = [p.requires_grad for p in every.values()]
        for p in every.values():
            p.requires_grad_(False)
        for p in chosen:
            p.requires_grad_(True)
        found = []
        with bench.local_layers():
            for batch in pool.batches if chosen else []:
                own = torch.autograd.grad(task.loss(model, batch), chosen, materialize_grads=True)
                found.append(_joined(list(own), picked))
        for p, flag in zip(every.values(), was, strict=True):
            p.requires_grad_(flag)
    rows = torch.stack(found) if found else torch.empty(0, 0)
    return Gradients(names, picked, functional.normalize(rows, dim=1))


def _joined(tensors: list[torch.Tensor], picked: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])[picked]
