"""Dropout's randomness as a stream of its own, though torch draws it from a global generator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from fedstrata.models.dropout import drawing


class DropoutRng:
    """A stream of random bits for dropout that goes on from one :meth:`fork` to the next.

    On a CPU dropout and attention draw from numpy's SFC64. Whatever else draws, a GPU or a model with functions
    of its own, does so from torch's global generators: inside they are this stream's, outside as if it never was.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.bits = np.random.SFC64(seed)
        self.cuda = [device] if device.type == "cuda" else []
        self.state: list[torch.Tensor] = []

    def words(self, shape: Sequence[int]) -> torch.Tensor:
        """16 random bits for each element of ``shape``, as int16."""
        count = math.prod(shape)
        raw = self.bits.random_raw(-(-count // 4)).astype("<u8", copy=False)
        return torch.from_numpy(raw.view("<i2")[:count].reshape(tuple(shape)))

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Draw from the stream."""
        with torch.random.fork_rng(self.cuda), drawing(self.words):
            if self.state:
                torch.set_rng_state(self.state[0])
                for device, state in zip(self.cuda, self.state[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            elif self.device.type == "cpu":
                torch.default_generator.manual_seed(self.seed)  # torch.manual_seed takes 1 ms for GPUs to come
            else:
                torch.manual_seed(self.seed)
            yield
            self.state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.cuda)]
