"""Trained matrices in bf16 beside those in fp32, cast once after a step and not in each pass.

In bf16 autocast casts every trained matrix in each forward pass, and its gradient back to fp32 in each backward
pass, where all gradients then lie until the optimizer's step. Here linear modules hold copies in bf16, whose
gradients the optimizer takes a few at a time; on a GPU all at once, where a call costs more than what it computes.
It casts the same numbers, so the weights come to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from fedstrata.client.optimizer import step
from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.job.tables import Train
from fedstrata.models.numbers import NumberLinear
from fedstrata.models.parts import LINEAR

LEAST = 1 << 16
"""Elements of a matrix below which casts take no time on a CPU."""
TOGETHER = 1 << 22
"""Elements whose gradients are fp32 at the same time on a CPU, if one matrix does not have more."""

Halves = list[list[tuple[torch.nn.Parameter, torch.nn.Parameter]]]
"""Matrices, each with its copy in bf16; those that the optimizer takes together."""


@contextmanager
def trained_in_bf16(working: WorkingModel, trained: Parameters, train: Train) -> Iterator[Halves]:
    """Inside, linear modules that are trained hold copies in bf16; :func:`step_halves` moves both.

    There are none where anything but the optimizer reads gradients.

    Args:
        working: the model.
        trained: what is trained.
        train: how.
    """
    here = working.device.type == "cpu"
    placed = [
        (module, leaf, trained[name])
        for name in (trained if _goes_with(working, train) else ())
        if name not in working.parts.sharing.narrowed and trained[name].numel() >= (LEAST if here else 0)
        for module, leaf in working.only_place(name)
        if isinstance(module, LINEAR) and not isinstance(module, NumberLinear)
    ]
    made: Halves = [[]]
    for module, leaf, whole in placed:
        if here and sum(other.numel() for other, _ in made[-1]) + whole.numel() > TOGETHER:
            made.append([])
        module._parameters[leaf] = half = torch.nn.Parameter(whole.detach().to(torch.bfloat16))
        made[-1].append((whole, half))
    try:
        yield made
    finally:
        for module, leaf, whole in placed:
            module._parameters[leaf] = whole


def _goes_with(working: WorkingModel, train: Train) -> bool:
    """Whether a step is one backward pass, whose gradients the optimizer alone reads."""
    alone = train.gradient_accumulation == 1 and train.max_grad_norm is None and not train.proximal_mu
    adapters = any(part.kind == "adapter" for part in working.parts.each)  # peft asks for their dtype
    return alone and working.bf16 and not adapters


@torch.no_grad()
def step_halves(optimizer: torch.optim.Optimizer, rate: float, halves: Halves) -> None:
    """One step at a learning rate, of what has copies too; the gradients are used up."""
    for some in halves:
        moved = [(whole, half) for whole, half in some if half.grad is not None]
        wholes: list[torch.Tensor] = [whole for whole, _ in moved]
        copies: list[torch.Tensor] = [half for _, half in moved]
        for whole in wholes:
            whole.grad = torch.empty_like(whole)
        if moved:
            torch._foreach_copy_(_gradients(wholes), _gradients(copies))
        for half in copies:
            half.grad = None  # before the step, which needs memory too
        step(optimizer, rate)
        if moved:
            torch._foreach_copy_(copies, wholes)


def _gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]
