"""Single client: the first client trains on its own rows, the others do not exist.

What one institution reaches alone, on the common test rows. ``local`` asks it of every client.

    usual words               here
    single client             the first client of the split; everything is kept, nothing is sent

Requirements: none. Relations: ``centralized`` with one client's rows. Cost: no bytes.
"""

from __future__ import annotations

from typing import ClassVar

from fedstrata.methods.centralized import Centralized
from fedstrata.plan.kinds import Population


class Single(Centralized):
    """Everything is trained and kept, by the first client."""

    population: ClassVar[Population] = "one"
