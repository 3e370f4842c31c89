"""Randomness: one independent stream per (seed, round, client, use), never a global one.

A stream depends on nothing but its four coordinates, so the order in which clients are visited, the number of
workers and the engine cannot change a draw, and a resumed run needs no saved generator.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SERVER = "server"
"""The client coordinate of draws that belong to no client."""


# Uses of a stream. Their values are hashed into every draw: they never change, whatever the things are called now.
ARRIVALS = "arrivals"
BATCH = "batch"
CLIENTS = "clients"
DROPOUT = "dropout"
EVALUATE = "evaluate"
HOLDOUT = "holdout"
INIT = "init"
LAYERS = "layers"
ORDER = "order"
OWN_TEST = "test"
PARTITION = "split"
SERVER_DROPOUT = "dropout of the server"


@dataclass(frozen=True)
class Streams:
    """The random streams of one run."""

    seed: int

    def key(self, round: int, client: str, use: str) -> bytes:
        """32 bytes for the stream of these coordinates."""
        return hashlib.sha256(f"{self.seed}\0{round}\0{client}\0{use}".encode()).digest()

    def integer(self, round: int, client: str, use: str) -> int:
        """A 63-bit seed for the stream of these coordinates."""
        return int.from_bytes(self.key(round, client, use)[:8], "little") >> 1

    def numpy(self, round: int, client: str, use: str) -> np.random.Generator:
        """A fresh numpy generator at the start of the stream of these coordinates."""
        import numpy as np  # here: a job file is read without it

        return np.random.Generator(np.random.PCG64(self.integer(round, client, use)))
