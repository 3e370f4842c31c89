"""No training: the initial model as it is. The row "BERT" in the papers' tables of further pre-training.

    usual term                  here
    no further training         no rounds; the stage scores its initial model and passes it on

Requirements: none. Relations: the opposite of ``centralized``. Cost: nothing.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, NonNegativeInt

from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class NoTraining(Method):
    """No client trains anything."""

    rounds: Annotated[NonNegativeInt, BeforeValidator(lambda rounds: 0)] = 0
    """Always 0, also where the job sets a number of rounds."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The whole model, unchanged, to be scored."""
        return Plan(layers=tuple(range(parts.depth)), train=())
