"""The ledger: every byte of tensor payload that is communicated, by round, client, phase, direction and part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SETUP = -1
"""The round of the initial download, which comes before the first one."""
Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One part on its way to or from one client.

    Attributes:
        round: 0-based; ``SETUP`` for the start model.
        client: the client's name.
        phase: what it is for.
        direction: ``down`` from the server, ``up`` to it.
        part: the part.
        bytes: payload, without headers or transport.
    """

    round: int
    client: str
    phase: Literal["setup", "hidden_states", "train", "evaluate"]
    direction: Direction
    part: str
    bytes: int

    def record(self) -> dict[str, Any]:
        """The entry as a line of ``ledger.jsonl``."""
        return {
            "round": self.round,
            "client": self.client,
            "phase": self.phase,
            "direction": self.direction,
            "part": self.part,
            "bytes": self.bytes,
        }


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes ``up`` and ``down`` over all rounds, clients and parts, and ``setup`` apart."""
    total = {"up": 0, "down": 0, "setup": 0}
    for record in records:
        total["setup" if record["phase"] == "setup" else record["direction"]] += record["bytes"]
    return total
