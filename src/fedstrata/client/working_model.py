"""One model in memory whose weights are swapped in part by part; nothing is rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fedstrata.models.attention import place_attention
from fedstrata.models.dropout import place_dropout
from fedstrata.models.families import FAMILIES
from fedstrata.models.numbers import NumberLinear, place_numbers
from fedstrata.models.parts import LINEAR
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Tagged
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.wire.on_disk import ALIGNED, let_go

Parameters = Mapping[str, torch.nn.Parameter]
"""Trained parameters by the names they have in the model."""


class WorkingModel:
    """The model that trainers, scorers and the server's layers of one process compute with.

    Args:
        model: a model with a task head; it is moved to ``device``.
        parts: the model's parts.
        device: ``cpu`` or ``cuda``.
        bf16: matrices are multiplied in bf16.
    """

    def __init__(self, model: Any, parts: Parts, device: str = "cpu", bf16: bool = False) -> None:
        self.model = model.to(device)
        _align(model)
        place_dropout(model)
        place_attention(model)
        place_numbers(model)
        self.parts = parts
        self.bf16 = bf16 and parts.architecture in FAMILIES
        self._tags: dict[str, object] = {}
        self._places = _places(model)
        self._halves: dict[str, tuple[torch.nn.Parameter, int, torch.nn.Parameter]] = {}

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.model.device
        return device

    def load(self, weights: Tagged) -> None:
        """Put weights into the model; a part that is there already, by its tag, is not copied again."""
        for part, (tag, new) in weights.items():
            if tag is None or self._tags.get(part) != tag:
                if own := self.tensors([part]):
                    torch._foreach_copy_(list(own.values()), [new[name] for name in own])
                let_go(new.values())
                self._tags[part] = tag

    def tensors(self, names: Iterable[str]) -> Tensors:
        """The model's own tensors of the named parts (no copies)."""
        return {name: own.detach() for name, own in self.parameters(names).items()}

    def only_place(self, name: str) -> list[tuple[torch.nn.Module, str]]:
        """The module that a parameter stands in, and under which name; none if it stands in several."""
        return self._places[name] if len(self._places[name]) == 1 else []

    def changed(self, names: Iterable[str]) -> None:
        """These parts are about to be trained: they are no longer what was loaded."""
        for part in names:
            self._tags[part] = None
            for name in self.parts.shapes[part]:
                self._halves.pop(name, None)  # fused optimizers do not count a tensor's versions

    def parameters(self, names: Iterable[str]) -> Parameters:
        """The model's parameters of the named parts."""
        return {name: self._parameter(name) for part in names for name in self.parts.shapes[part]}

    def swap_parameters(self, names: Iterable[str]) -> None:
        """Replace these parts' parameters with fresh tensors; another client may still be using the old ones."""
        names = list(names)
        old = self.parameters(names)
        self.set_parameters(
            {name: torch.nn.Parameter(torch.empty_like(p), p.requires_grad) for name, p in old.items()}
        )
        self.changed(names)

    def set_parameters(self, parameters: Parameters) -> None:
        """Make parameters the model's, in every place where it has them."""
        for name, parameter in parameters.items():
            for module, leaf in self._places[name]:
                setattr(module, leaf, parameter)

    @contextmanager
    def frozen_in_bf16(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, the linear modules of the named parts have their frozen weights in bf16.

        Autocast would cast these weights anew in every step, to the same bits; here it is done once for as long as
        they do not change. Weights that are trained stay as they are.
        """
        replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        learning = torch.is_grad_enabled()
        for name in (name for part in names for name in self.parts.shapes[part]) if self.bf16 else ():
            for module, leaf in self._places[name]:
                parameter = module._parameters[leaf]
                if parameter is None or not isinstance(module, LINEAR) or isinstance(module, NumberLinear):
                    continue
                if learning and parameter.requires_grad:
                    continue
                replaced.append((module, leaf, parameter))
                module._parameters[leaf] = self._half(name, parameter)
        try:
            yield
        finally:
            for module, leaf, parameter in replaced:
                module._parameters[leaf] = parameter

    def _half(self, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """A parameter in bf16, cast again only if it has changed."""
        source, version, half = self._halves.get(name, (None, 0, parameter))
        if source is not parameter or version != parameter._version:
            with torch.inference_mode(False):  # training uses what scoring has made
                half = torch.nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
            self._halves[name] = parameter, parameter._version, half
        return half

    def trainable(self, plan: Plan) -> dict[str, torch.nn.Parameter]:
        """Freeze all but what the plan trains and the server's layers; what the plan trains, by name.

        Below the lowest trained part autograd then builds no graph.
        """
        names = plan.learning(self.parts)
        served = {name for part in plan.away(self.parts) for name in self.parts.shapes[part]}
        parameters = {name: self._parameter(name) for name in self._places}
        for name, parameter in parameters.items():
            if name not in served:
                parameter.requires_grad_(name in names)
        return {name: parameter for name, parameter in parameters.items() if name in names}

    def _parameter(self, name: str) -> torch.nn.Parameter:
        module, leaf = self._places[name][0]
        parameter = module._parameters[leaf]
        assert parameter is not None
        return parameter


def _align(model: torch.nn.Module) -> None:
    """Let every tensor begin where torch would put it: a library's product may differ in its last bits elsewhere.

    Weights that are read from a file begin wherever they stand in it.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()


def _places(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Every parameter's name -> the modules it stands in, and under which name; a tied one stands in several."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, leaf))
    return places
