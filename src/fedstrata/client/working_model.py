"""One model in memory whose weights are swapped in part by part; nothing is rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fedstrata.models.parts import part_tensors
from fedstrata.plan.messages import Tagged
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan

Parameters = Mapping[str, torch.nn.Parameter]
"""Trained parameters by the names they have in the model."""


class WorkingModel:
    """The model that trainers, scorers and the server's layers of one process compute with.

    Args:
        model: a model with a task head; it is moved to ``device``.
        parts: the model's parts.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, model: Any, parts: Parts, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.parts = parts
        self._tags: dict[str, object] = {}
        self._places = _places(model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.model.device
        return device

    def load(self, weights: Tagged) -> None:
        """Put weights into the model; a part that is there already, by its tag, is not copied again."""
        for part, (tag, new) in weights.items():
            if tag is None or self._tags.get(part) != tag:
                for name, parameter in part_tensors(self.model, self.parts, [part]).items():
                    parameter.copy_(new[name])
                self._tags[part] = tag

    def changed(self, names: Iterable[str]) -> None:
        """These parts are about to change: they are no longer what was loaded."""
        self._tags.update(dict.fromkeys(names))

    def swap_parameters(self, names: Iterable[str]) -> None:
        """Replace these parts' parameters with fresh tensors; another client may still be using the old ones."""
        names = list(names)
        old = {name: self.model.get_parameter(name) for part in names for name in self.parts.shapes[part]}
        self.set_parameters(
            {name: torch.nn.Parameter(torch.empty_like(p), p.requires_grad) for name, p in old.items()}
        )
        self.changed(names)

    def set_parameters(self, parameters: Parameters) -> None:
        """Make parameters the model's, in every place where it has them."""
        for name, parameter in parameters.items():
            for module, leaf in self._places[name]:
                setattr(module, leaf, parameter)

    def trainable(self, plan: Plan) -> dict[str, torch.nn.Parameter]:
        """Freeze all but what the plan trains and the server's layers; what the plan trains, by name.

        Below the lowest trained part autograd then builds no graph.
        """
        names = {name for part in plan.train for name in self.parts.shapes[part]}
        served = {name for part in plan.server for name in self.parts.shapes[part]}
        for name, parameter in self.model.named_parameters():
            if name not in served:
                parameter.requires_grad_(name in names)
        return {name: p for name, p in self.model.named_parameters() if name in names}


def _places(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Every parameter's name -> the modules it stands in, and under which name; a tied one stands in several."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, leaf))
    return places
