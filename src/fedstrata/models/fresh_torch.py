"""torch as a fresh process has it: what a notebook has set beside a run must not change the run's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def fresh_torch() -> Iterator[None]:
    """Gradients, numbers of 32 bits and the processor are the defaults inside; also a decorator.

    A caller finds its own settings again. A run's worker processes never see them.
    """
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    elsewhere = torch.get_default_device().type != "cpu"
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _outside_autocast(),
            torch.device("cpu") if elsewhere else nullcontext(),  # every call of torch takes longer inside
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _outside_autocast() -> Iterator[None]:
    """As outside of every autocast: within one, another keeps its 16-bit copies of weights when it ends.

    A step would then compute with the weights of the step before.
    """
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device, was in enabled.items():
            torch.set_autocast_enabled(device, was)
        for _ in range(depth):
            torch.autocast_increment_nesting()
