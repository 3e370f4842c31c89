"""One set of the layers that the server holds; clients with copies of their own each take one."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from fedstrata.client.optimizer import Anchor
from fedstrata.wire.finite import all_finite


@dataclass(eq=False)
class LayerReplica:
    """One set of the layers.

    Attributes:
        modules: the layers, from below.
        held: their parameters, by the names they have in the model.
        trained: those of them that are trained.
        in_use: reserved by an open session.
        stepping: the step that was begun last.
        anchor: what the proximal term holds the parameters near: the weights that were loaded.
    """

    modules: list[torch.nn.Module]
    held: dict[str, torch.nn.Parameter]
    trained: dict[str, torch.nn.Parameter]
    in_use: bool = False
    stepping: Future[None] | None = None
    anchor: Anchor = field(default_factory=list)

    def another(self) -> LayerReplica:
        """A further set, whose weights are yet to be loaded."""
        return LayerReplica(*copy.deepcopy((self.modules, self.held, self.trained)))

    def gradients_are_finite(self) -> bool:
        """Whether all gradients are, as far as there are any."""
        return all(all_finite(p.grad) for p in self.trained.values() if p.grad is not None)

    def wait(self) -> None:
        """Wait for the step that was begun; before it is done nothing may use the layers."""
        stepping, self.stepping = self.stepping, None
        if stepping:
            stepping.result()
