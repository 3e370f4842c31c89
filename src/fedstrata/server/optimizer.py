"""The server's optimizer: how the round's aggregate moves the server's weights.

All but plain averaging treat ``aggregate - old`` as a gradient (Reddi et al. 2021, Algorithm 2; momentum: Hsu et
al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.renamed import renamed
from fedstrata.job.tables import Server
from fedstrata.plan.kinds import Tensors

LEARNING_RATES: Mapping[str, float] = {"sgd": 1.0, "momentum": 1.0, "adam": 0.01, "yogi": 0.01, "adagrad": 0.003}
"""Optimizer -> its learning rate where the job names none; the adaptive ones' are the best of those tried on
development rows of SST-2 (docs/results/server_optimizers.md)."""


class ServerOptimizer(Protocol):
    """What is done with a round's aggregate."""

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        """One tensor's next value.

        Args:
            old: its value before the round, fp32.
            aggregate: the round's aggregate of it, fp32; of a wire that rounds, ``old`` and the clients' change
                against what they received.
            moments: the optimizer's memory of this tensor, changed in place; it is saved with the run's state.
        """


@dataclass(frozen=True)
class AdaptiveOptimizer:
    """The optimizers of ``[server] optimizer``.

    Attributes:
        name: a key of :data:`LEARNING_RATES`.
        learning_rate: None for the optimizer's own.
        momentum: of ``momentum``; beta 1 of the adaptive ones (adagrad: 0).
        beta2: decay of the second moment.
        tau: its floor; the second moment starts at tau squared.
    """

    name: str = "sgd"
    learning_rate: float | None = None
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @property
    def plain(self) -> bool:
        """It takes the aggregate as it is (FedAvg)."""
        return self.name == "sgd" and self.learning_rate in (None, 1.0)

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        """See :class:`ServerOptimizer`; ``sgd`` with learning rate 1 takes the aggregate as it is (FedAvg)."""
        if self.plain:
            return aggregate
        rate = LEARNING_RATES[self.name] if self.learning_rate is None else self.learning_rate
        delta = aggregate - old
        if self.name == "sgd":
            return old + rate * delta
        first = moments.get("first", torch.zeros_like(old))
        if self.name == "momentum":
            moments["first"] = self.momentum * first + delta
            return old + rate * moments["first"]
        beta1 = 0.0 if self.name == "adagrad" else self.momentum
        moments["first"] = beta1 * first + (1 - beta1) * delta
        second = moments.get("second", torch.full_like(old, self.tau**2))
        moments["second"] = self._second(second, delta**2)
        return old + rate * moments["first"] / (moments["second"].sqrt() + self.tau)

    def _second(self, second: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        if self.name == "adam":
            return self.beta2 * second + (1 - self.beta2) * square
        if self.name == "yogi":
            return second - (1 - self.beta2) * square * torch.sign(second - square)
        return second + square


def _adaptive(table: Server) -> ServerOptimizer:
    return AdaptiveOptimizer(table.optimizer, table.learning_rate, table.momentum, table.beta2, table.tau)


OPTIMIZERS: Mapping[str, Callable[[Server], ServerOptimizer]] = dict.fromkeys(LEARNING_RATES, _adaptive)
"""``[server] optimizer`` -> what makes it of that table. One more is a class and a line here."""


def make_server_optimizer(table: Server) -> ServerOptimizer:
    """The optimizer that a job's ``[server]`` names.

    Raises:
        UserError: there is none.
    """
    name = table.optimizer
    if name not in OPTIMIZERS:
        now = renamed("server", "optimizer", name) or f"{name!r} is invalid; {did_you_mean(name, OPTIMIZERS)}"
        raise UserError(f"[server] optimizer: {now}")
    return OPTIMIZERS[name](table)
