"""A local model of another depth, without building it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fedstrata.plan.parts import Parts


@contextmanager
def in_stack(
    model: nn.Module, parts: Parts, build: Callable[[nn.ModuleList], Sequence[nn.Module]]
) -> Iterator[None]:
    """Inside the context, what ``build`` makes of the model's stack of layers takes its place."""
    above, name = parts.stack.rsplit(".", 1)
    holder = model.get_submodule(above)
    stack = holder.get_submodule(name)
    assert isinstance(stack, nn.ModuleList)
    holder.register_module(name, nn.ModuleList(build(stack)))
    try:
        yield
    finally:
        holder.register_module(name, stack)


@contextmanager
def local_depth(model: Any, parts: Parts, layers: Sequence[int]) -> Iterator[None]:
    """Inside the context, ``model`` has layer ``layers[j]`` of its stack at position ``j``.

    The modules themselves are reused: no weight is copied, a layer may occur twice, and training it inside trains
    the whole model's layer. Models that read the kinds of attention of their layers in their config, and not at
    the layers, find them there in the same order.
    """
    config = model.base_model.config
    kinds = vars(config).get("layer_types")  # Mamba's are made when they are asked for
    with in_stack(model, parts, lambda stack: [stack[i] for i in layers]):
        if kinds:
            config.layer_types = [kinds[i] for i in layers]
        try:
            yield
        finally:
            if kinds:
                config.layer_types = kinds
