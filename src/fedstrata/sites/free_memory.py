"""Memory that is free again goes back to the system: between two rounds a site may wait for hours."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Let the C library give back what it keeps for later; where it is not glibc it does so by itself, or cannot.

    Without this a training's gradients and optimizer stay with the process after they are freed, in pieces that
    the next round's do not fit into.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
