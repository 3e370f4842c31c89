"""Dropout's randomness as a stream of its own, though torch draws it from a global generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DropoutRng:
    """Torch's own generators, in a stream that goes on from one :meth:`fork` to the next.

    Dropout draws from generators that are global; inside they are this stream's, outside as if it never was.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.cuda = [device] if device.type == "cuda" else []
        self.state: list[torch.Tensor] = []

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Draw from the stream."""
        with torch.random.fork_rng(self.cuda):
            if self.state:
                torch.set_rng_state(self.state[0])
                for device, state in zip(self.cuda, self.state[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            else:
                torch.manual_seed(self.seed)
            yield
            self.state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.cuda)]
