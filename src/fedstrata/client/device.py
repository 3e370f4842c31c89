"""Where this machine computes, in words, and whether it has a GPU that is not used."""

from __future__ import annotations

import os
from pathlib import Path

import torch

DEVICES = Path("/dev")
"""Where Linux has a file for each GPU of NVIDIA's."""


def device_words(device: str) -> str:
    """What ``cpu`` or ``cuda`` is here."""
    return "the processor" if device == "cpu" else f"a GPU, {torch.cuda.get_device_name(0)}"


def idle_gpu(hidden: bool) -> list[str]:
    """That a GPU is here and torch cannot use it, which a user would else learn from the time that a run takes.

    Nothing where it is ``hidden``: not asked for, or taken away from this program.
    """
    hidden = hidden or "CUDA_VISIBLE_DEVICES" in os.environ
    if hidden or torch.cuda.is_available() or not any(DEVICES.glob("nvidia[0-9]*")):
        return []
    return [
        "this machine has a GPU that the installed torch cannot use, so training is on the processor; "
        "pytorch.org/get-started/locally says which torch can"
    ]
