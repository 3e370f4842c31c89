"""A device that is not there: its tensors hold real data, and refuse what tensors on a GPU would refuse.

They say that they are on ``meta``, the one device but the CPU that every build of torch has. What they hold is on
the CPU, where it is computed with. An operation on tensors of both devices, a tensor of the device given to numpy,
and a copy from it that nobody waits for are errors. Not played are a GPU's random numbers, its memory, fused
optimizers, and what is asked of ``cuda`` by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fedstrata.client import setup
from fedstrata.client.working_model import WorkingModel
from fedstrata.runs import stages

aten = torch.ops.aten
DEVICE = torch.device("meta")
COPIES = {aten.copy_.default, aten._foreach_copy_.default, aten._to_copy.default}
"""May have tensors of both devices."""
JOINING = {aten.cat.default, aten.stack.default}
"""Take not even a single number from the CPU."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""May have indices on the CPU."""


class Refused(RuntimeError):
    """What a GPU does not do."""


class There(torch.Tensor):
    """A tensor on the device; what it holds is ``here``."""

    here: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> There:
        place = here.stride(), here.storage_offset()
        made: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.size(), *place, dtype=here.dtype, device=DEVICE
        )
        made.here = here
        return made

    def tolist(self) -> Any:
        """As on a GPU; of tensors made in Python torch has none, nor gives them to numpy."""
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return compute(op, args, kwargs or {})


class Attached(TorchDispatchMode):
    """Inside, tensors can be put on the device; one that is there needs no such help."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return compute(op, args, kwargs or {})


def compute(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator as the device would."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    away = any(isinstance(tensor, There) for tensor in tensors)
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if (not away and target != DEVICE) or any(t.device == DEVICE and not isinstance(t, There) for t in tensors):
        return op(*args, **kwargs)  # nothing of it is there, or it is of shapes alone
    if away:
        check(op, args, tensors)
    if away and target is not None and target != DEVICE and kwargs.get("non_blocking"):
        raise Refused("a copy from the device that nobody waits for")
    options = dict(kwargs) if target is None else {**kwargs, "device": torch.device("cpu")}
    own, named = tree_map(lambda leaf: leaf.here if isinstance(leaf, There) else leaf, (tuple(args), options))
    out = op(*own, **named)
    if target not in (None, DEVICE):
        return out
    if op is aten.copy_.default:
        return args[0]
    out = tree_map(lambda leaf: There(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
    return return_and_correct_aliasing(op, args, kwargs, out) if away else out


def check(op: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an operation on tensors of both devices; a single number on the CPU is none."""
    if op in COPIES:
        return
    plain = [tensor for tensor in tensors if not isinstance(tensor, There) and (tensor.ndim or op in JOINING)]
    if op in INDEXING and isinstance(args[0], There):
        plain = [tensor for tensor in plain if tensor.is_floating_point()]
    if plain:
        raise Refused(f"{op}: tensors on the device and, of shapes {[tuple(t.shape) for t in plain]}, on the CPU")


class Autocast(torch.autocast):
    """On the device nothing is cast: torch knows no autocast on ``meta``."""

    def __init__(self, device: str, *arguments: Any, **options: Any) -> None:
        if device == DEVICE.type:
            device, options = "cpu", {**options, "enabled": False}
        super().__init__(device, *arguments, **options)


def no_grad(mode: bool = True) -> torch.set_grad_enabled:
    """As quick as torch's inference mode for what is computed here."""
    return torch.set_grad_enabled(not mode)


def attached(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the device beside it."""

    def inside(*arguments: Any, **options: Any) -> Any:
        with Attached():
            return call(*arguments, **options)

    return inside


def attach(patch: pytest.MonkeyPatch) -> list[WorkingModel]:
    """Let this process's runs train on the device; the list receives the models that do."""
    made: list[WorkingModel] = []

    def working(model: Any, parts: Any, device: str = "cpu", bf16: bool = False) -> WorkingModel:
        with Attached():
            model.to(DEVICE)
            model.tie_weights()  # each of two tied modules has made a parameter of its own
            made.append(WorkingModel(model, parts, DEVICE.type, bf16))
        return made[-1]

    def submit(pool: ThreadPoolExecutor, call: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        return beside(pool, attached(call), *arguments, **options)

    beside = ThreadPoolExecutor.submit
    patch.setattr(setup, "WorkingModel", working)  # a job can name no such device
    for name in ("start_weights", "train_stage"):  # what comes before is of shapes alone, on the true ``meta``
        patch.setattr(stages, name, attached(getattr(stages, name)))
    patch.setattr(ThreadPoolExecutor, "submit", submit)  # a mode is of one thread
    patch.setattr(torch, "autocast", Autocast)
    patch.setattr(torch, "inference_mode", no_grad)  # in it tensors of Python have no views
    return made
