"""Which of some texts a message was trained on: its change as a sum of the texts' own gradients.

A step moves what is sent along the gradients of its texts, and whoever has the model can compute the gradient of
any text. A ridge regression of the change on the gradients of all texts in question says how much of each it has.
Texts of one class have gradients that are much alike: the regression gives each no more than the others leave,
where the product of the change with a single gradient tells little but the class.
"""

from __future__ import annotations

from collections.abc import Sequence

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
"""How alike the gradients of two texts are is computed from so many of their numbers, drawn at random."""
RIDGE = 0.1
"""Of the square of a gradient, whose length is 1."""
ATTACK = "gradients of the texts"
"""What the findings call it."""


def attack(trainings: ShortTrainings, pool: Pool, target: Played, inside: Truth) -> list[Finding]:
    """The texts of one step, and those of a whole training, from what is sent after it.

    Args:
        trainings: makes the step.
        pool: the texts in question.
        target: the training.
        inside: which texts it and the step draw from, ``[n]``.
    """
    bench, found = trainings.bench, []
    names = _names(bench, target)
    if not names:
        return []
    step = trainings.train("membership, 1 step", pool.examples, np.flatnonzero(inside), 1)
    for played, scored in zip((step, target), scores(bench, pool, names, (step, target)), strict=True):
        used = np.zeros(len(inside), dtype=bool)
        for seen in played.seen:
            used[seen.index] = True
        if used.any():  # at level "example" perhaps nobody was drawn
            found += found_in(bench, SHORT, plural(played.reply.steps, "step"), {ATTACK: scored}, used)
    return found


def scores(bench: Bench, pool: Pool, names: Sequence[str], messages: Sequence[Played]) -> list[Floats]:
    """How much of each text is in each message, ``[n]`` each.

    The product of a text's gradient with a change is taken over all numbers: noise lies on all of them, and a
    draw of them would tell less than an attacker sees. Products of two gradients have no noise: there one will do.

    Args:
        bench: the stage, with the model that the messages began with.
        pool: the texts in question.
        names: the tensors that are looked at.
        messages: of one round, with these tensors.
    """
    changes, rows, products = [_change(message, names) for message in messages], [], []
    with bench.model() as model, torch.enable_grad():
        every = dict(model.named_parameters())
        chosen, task = [every[name] for name in names], bench.ready.runtime.trainer.task
        total, draw = sum(p.numel() for p in chosen), torch.Generator().manual_seed(0)
        picked = torch.randint(total, (NUMBERS,), generator=draw) if total > NUMBERS else torch.arange(total)
        was = [p.requires_grad for p in every.values()]
        for p in every.values():
            p.requires_grad_(False)
        for p in chosen:
            p.requires_grad_(True)
        with bench.local_layers():
            for batch in pool.batches:
                own = torch.autograd.grad(task.loss(model, batch), chosen, materialize_grads=True)
                flat_own = torch.cat([gradient.float().flatten() for gradient in own])
                rows.append(flat_own[picked])
                unit = functional.normalize(flat_own, dim=0)
                products.append([float(torch.dot(unit, change)) for change in changes])
        for p, flag in zip(every.values(), was, strict=True):
            p.requires_grad_(flag)
    alike = functional.normalize(torch.stack(rows), dim=1).double()
    square = alike @ alike.T + RIDGE * torch.eye(len(rows), dtype=torch.float64)
    solved = torch.linalg.solve(square, torch.tensor(products, dtype=torch.float64))
    return [column.numpy() for column in solved.T]


def _names(bench: Bench, played: Played) -> list[str]:
    """The tensors of a message whose gradients are looked at; rows of embeddings are read otherwise."""
    tables = {name for part in bench.parts.each if part.kind == "embeddings" for name in part.shapes}
    with bench.model() as model:
        own = {name for name, _ in model.named_parameters()} - tables
    return [name for name in flat(played.after) if name in own]


def _change(played: Played, names: Sequence[str]) -> torch.Tensor:
    """What a training subtracted from the tensors, as one row."""
    before, after = flat(played.before), flat(played.after)
    return torch.cat([(before[name] - after[name]).float().flatten() for name in names])
