"""Randomness: one independent stream per (seed, round, client, use), never a global one.

A stream depends on nothing but its four coordinates, so the order in which clients are visited, the number of
workers and the engine cannot change a draw, and a resumed run needs no saved generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

SERVER = "server"
"""The client coordinate of draws that belong to no client."""


@dataclass(frozen=True)
class Streams:
    """The random streams of one run."""

    seed: int

    def integer(self, round: int, client: str, use: str) -> int:
        """A 63-bit seed for the stream of these coordinates."""
        name = f"{self.seed}\0{round}\0{client}\0{use}".encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "little") >> 1

    def numpy(self, round: int, client: str, use: str) -> np.random.Generator:
        """A fresh numpy generator at the start of the stream of these coordinates."""
        return np.random.Generator(np.random.PCG64(self.integer(round, client, use)))


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
