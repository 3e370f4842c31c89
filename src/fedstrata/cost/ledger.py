"""The ledger: every byte of tensor payload that crosses the wire, by round, client, phase, direction and part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedstrata.plan.kinds import Tensors

SETUP = -1
"""The round of what is shipped before the first one."""


@dataclass(frozen=True)
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
    direction: Literal["up", "down"]
    part: str
    bytes: int

    def record(self) -> dict[str, Any]:
        """The entry as a line of ``ledger.jsonl``."""
        return asdict(self)


def size(tensors: Tensors) -> int:
    """Bytes of tensors as they travel."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes ``up`` and ``down`` over all rounds, clients and parts, and ``setup`` apart."""
    made = {"up": 0, "down": 0, "setup": 0}
    for record in records:
        made["setup" if record["phase"] == "setup" else record["direction"]] += record["bytes"]
    return made
