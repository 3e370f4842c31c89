"""Single client: the first client trains on its own rows, without the others.

The score of one institution alone, on the shared test rows. ``local`` does the same for every client.

    usual term                here
    single client             the first client of the partition; everything is kept, nothing is sent

Requirements: none. Relations: ``centralized`` with one client's rows. Cost: no bytes.
"""

from __future__ import annotations

from typing import ClassVar

from fedstrata.methods.centralized import Centralized
from fedstrata.plan.kinds import Population


class Single(Centralized):
    """Everything is trained and kept, by the first client."""

    population: ClassVar[Population] = "one"
