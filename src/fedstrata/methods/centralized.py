"""Centralized: one place holds all the data. The upper bound for federated training.

    usual term                here
    pooled data               one client that holds every row
    no communication          everything is kept, nothing is sent

Requirements: data that may be pooled, so: experiments only.
Relations: FedAvg with one client, without communication. A round is ``train.epochs`` over all rows with a new
optimizer, so that both do the same steps.
Cost: no bytes; the compute of all clients together.
"""

from __future__ import annotations

from typing import ClassVar

from fedstrata.plan.kinds import Population
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class Centralized(Method):
    """Everything is trained and kept, by one client with all rows."""

    population: ClassVar[Population] = "pooled"

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The same plan for every round."""
        return Plan(layers=tuple(range(parts.depth)), train=parts.names, keep=parts.names)
