"""Rows that stay as they are while the tensors that they are in learn: those that never travel."""

from __future__ import annotations

import torch

from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.plan.plan import Plan
from fedstrata.wire.partial import unlisted_rows


class HeldRows:
    """The unlisted rows of what a plan trains and sends, with the values that they had.

    Their gradients are none, also where all gradients together are shortened; nor do they decay. So what a client
    sends depends on no change of theirs.

    Args:
        working: the model.
        plan: what is trained and sent.
        trained: the trained parameters.
    """

    def __init__(self, working: WorkingModel, plan: Plan, trained: Parameters) -> None:
        parts, sharing = working.parts, working.parts.sharing
        sent = {name for part in plan.shared for name in parts.shapes[part]} & sharing.narrowed
        self.rows: dict[str, torch.Tensor] = {}
        """Tensor -> its unlisted rows, ``[n]`` int64."""
        self._values: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        for name, parameter in trained.items():
            if name in sent:
                rows = self.rows[name] = unlisted_rows(sharing, len(parameter)).to(parameter.device)
                self._values[name] = parameter, parameter.detach()[rows]

    def clear_gradients(self) -> None:
        """Before a step."""
        for name, (parameter, _) in self._values.items():
            if parameter.grad is not None:
                parameter.grad.index_fill_(0, self.rows[name], 0.0)

    @torch.no_grad()
    def put_back(self) -> None:
        """After a step."""
        for name, (parameter, values) in self._values.items():
            parameter.index_copy_(0, self.rows[name], values)
