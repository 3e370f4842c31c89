"""Local only: every client trains its own model on its own rows; nothing is ever sent.

The lower bound: a federated model should beat it for every client. The score is the mean over clients.

    usual term                here
    local only                every client, everything kept, nothing sent

Requirements: none. Relations: ``single`` for every client. Cost: no bytes.
"""

from __future__ import annotations

from typing import ClassVar

from fedstrata.methods.centralized import Centralized
from fedstrata.plan.kinds import Population


class Local(Centralized):
    """Everything is trained and kept, by each client for itself."""

    population: ClassVar[Population] = "each"
