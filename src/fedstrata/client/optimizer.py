"""The optimizer, its learning rate over the run, and its memory between rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedstrata.client.working_model import Parameters
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.schedule import ScheduleSpan

Anchor = list[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters with the values that they had when the round began: FedProx's reference."""

BLOCK = 1 << 17
"""Elements whose distance from the reference is made at once; it stays in a core's cache."""


def learning_rate(train: Train, span: ScheduleSpan, step: int, epoch: int | None = None) -> float:
    """The learning rate of a 0-based step of a client's round, in the 0-based ``epoch`` (None: of equal epochs).

    It rises linearly from 0 over the first ``warmup_ratio`` of the run; then it stays, or falls to 0 as a
    polynomial. A step stands for its middle, so that neither the first nor the last one moves nothing.
    """
    done = span.begin + (step + 0.5) / span.steps * (span.end - span.begin)
    if done < train.warmup_ratio:
        factor = done / train.warmup_ratio
    elif train.lr_schedule == "constant":
        factor = 1.0
    else:
        factor = ((1 - done) / (1 - train.warmup_ratio)) ** train.lr_power
    epoch = step // span.epoch if epoch is None else epoch
    return float(train.learning_rate * train.lr_decay**epoch * factor)


def make_optimizer(trained: Parameters, train: Train, memory: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """The job's optimizer over what is trained; biases and norms do not decay.

    Args:
        trained: the parameters.
        train: kind, rates and betas.
        memory: what :func:`memory_of` gave; parameters that it lacks start anew.
    """
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.learning_rate)
    else:
        betas = (train.betas[0], train.betas[1])
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon, fused=True)
    for key, tensor in memory.items():
        kind, name = key.split("|", 1)
        if name in trained:
            optimizer.state[trained[name]][kind] = tensor.to(trained[name].device, copy=True)
    return optimizer


def memory_of(optimizer: torch.optim.Optimizer, trained: Parameters) -> Tensors:
    """What the optimizer remembers of every parameter: ``KIND|NAME`` -> its moments and number of steps."""
    return {
        f"{kind}|{name}": value.to("cpu", copy=True)
        for name, parameter in trained.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def anchor_of(parameters: Iterable[torch.nn.Parameter], train: Train) -> Anchor:
    """What the proximal term holds these parameters near: their values now; empty without such a term."""
    return [(parameter, parameter.detach().clone()) for parameter in parameters] if train.proximal_mu else []


def add_proximal(anchor: Anchor, train: Train) -> None:
    """Add the gradient of mu/2 |w - w_t|^2, FedProx's term (Li et al. 2020, eq. 2), to those that are there."""
    for parameter, old in anchor:
        if parameter.grad is not None:
            for gradient, new, before in _blocks(parameter.grad, parameter.detach(), old):
                gradient.add_(new - before, alpha=train.proximal_mu)


def _blocks(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """The same elements of tensors of one shape, ``BLOCK`` at a time on a CPU."""
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(torch.split(tensor.view(-1), BLOCK) for tensor in tensors), strict=True)


def clip_gradients(trained: Parameters, train: Train) -> None:
    """Shorten the gradients of all trained tensors together to ``max_grad_norm``, where that is set."""
    if train.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained.values(), train.max_grad_norm)


def step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One step at a learning rate; the gradients are used up."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
