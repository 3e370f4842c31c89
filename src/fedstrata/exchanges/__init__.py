"""Exchanges: one file per payload, with all that differs between them.

A method says what leaves its clients (:attr:`fedstrata.plan.plan.Method.exchange`); the loop, the trainer, the
forecast and a site's check ask the exchange of that name and never which one it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedstrata.exchanges.activations import ACTIVATIONS
from fedstrata.exchanges.exchange import Exchange
from fedstrata.exchanges.hidden_states import HIDDEN_STATES
from fedstrata.exchanges.weights import WEIGHTS
from fedstrata.plan.kinds import Payload

EXCHANGES: Mapping[Payload, Exchange] = {
    "weights": WEIGHTS,
    "hidden_states": HIDDEN_STATES,
    "activations": ACTIVATIONS,
}
"""Payload -> its exchange."""
