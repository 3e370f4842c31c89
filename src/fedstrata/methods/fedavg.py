"""FedAvg: every client trains the whole model; the server averages the weights by numbers of examples.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017. https://proceedings.mlr.press/v54/mcmahan17a.html

    paper                     here
    W_k, client k's model     every part, trained and sent
    n_k / n                   share of the examples of the clients that replied

Requirements: none; any task.
Relations: with one client it is ``centralized``; every other method here trains or sends less.
Cost: the whole model up and down, per client and round.
"""

from __future__ import annotations

from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class FedAvg(Method):
    """Everything is trained and sent."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The same plan for every client and round."""
        return Plan(layers=tuple(range(parts.depth)), train=parts.names, send=parts.names)
