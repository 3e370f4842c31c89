"""The optimizer, its learning rate over the run, and its memory between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedstrata.client.config import Local
from fedstrata.plan.parts import Tensors

Parameters = Mapping[str, torch.nn.Parameter]
"""Trained parameters by the names they have in the model."""


@dataclass(frozen=True)
class ScheduleSpan:
    """Where a client's round stands in the run, as far as the learning rate depends on it.

    Attributes:
        steps: steps of the round.
        epoch: steps of one pass over the client's examples.
        begin: share of the run's training that lies before the round.
        end: share of it that is done when the round is.
    """

    steps: int
    epoch: int
    begin: float = 0.0
    end: float = 1.0

    def rate(self, local: Local, step: int) -> float:
        """The learning rate of a 0-based step.

        It rises in a line from 0 over the first ``warmup`` of the run; then it stays, or falls to 0 as a
        polynomial. A step stands for its middle, so that neither the first nor the last one moves nothing.
        """
        done = self.begin + (step + 0.5) / self.steps * (self.end - self.begin)
        if done < local.warmup:
            factor = done / local.warmup
        elif local.schedule == "constant":
            factor = 1.0
        else:
            factor = ((1 - done) / (1 - local.warmup)) ** local.power
        return local.learning_rate * local.decay ** (step // self.epoch) * factor


def adamw(trained: Parameters, local: Local, memory: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW over what is trained; biases and norms do not decay.

    Args:
        trained: the parameters.
        local: rates and betas.
        memory: what :func:`memory_of` made; parameters that it lacks start anew.
    """
    decayed = [p for p in trained.values() if p.ndim > 1]
    rest = [p for p in trained.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": local.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    made = torch.optim.AdamW(groups, lr=local.learning_rate, betas=local.betas, eps=local.epsilon, fused=True)
    for key, tensor in memory.items():
        kind, name = key.split("|", 1)
        if name in trained:
            made.state[trained[name]][kind] = tensor.to(trained[name].device, copy=True)
    return made


def memory_of(optimizer: torch.optim.Optimizer, trained: Parameters) -> Tensors:
    """What the optimizer remembers of every parameter: ``KIND|NAME`` -> its moments and number of steps."""
    return {
        f"{kind}|{name}": value.to("cpu", copy=True)
        for name, parameter in trained.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One step at a learning rate; the gradients are used up."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
