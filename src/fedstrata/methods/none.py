"""No training: the start model as it is. The row "BERT" of the papers' tables of further pre-training.

    usual words                 here
    no further training         no rounds; the stage scores the model it was given and hands it on

Requirements: none. Relations: the other end of the scale from ``centralized``. Cost: nothing.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, NonNegativeInt

from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class NoTraining(Method):
    """Nobody trains anything."""

    rounds: Annotated[NonNegativeInt, BeforeValidator(lambda asked: 0)] = 0
    """Always 0, also where another method's number of rounds lies under this one's name."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The whole model, untouched; for the scoring alone."""
        return Plan(layers=tuple(range(parts.depth)), train=())
