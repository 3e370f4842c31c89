"""A local model of another depth, without building it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from fedstrata.plan.parts import Parts


@contextmanager
def local_depth(model: nn.Module, parts: Parts, layers: Sequence[int]) -> Iterator[None]:
    """Inside the context, ``model`` has layer ``layers[j]`` of its stack at position ``j``.

    The modules themselves are reused: no weight is copied, a layer may occur twice, and training it inside trains
    the whole model's layer.
    """
    above, name = parts.stack.rsplit(".", 1)
    holder = model.get_submodule(above)
    stack = holder.get_submodule(name)
    assert isinstance(stack, nn.ModuleList)
    holder.register_module(name, nn.ModuleList([stack[i] for i in layers]))
    try:
        yield
    finally:
        holder.register_module(name, stack)
