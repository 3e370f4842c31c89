"""Exchanges: one file per payload, with all that differs between them.

A method says what leaves its clients (:attr:`fedstrata.plan.plan.Method.exchange`); the loop, the trainer, the
forecast and a site's check ask the exchange of that name and never which one it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import get_args

from fedstrata.exchanges.exchange import Exchange
from fedstrata.plan.kinds import Payload

EXCHANGES: Mapping[Payload, Exchange] = {
    payload: import_module(f"{__name__}.{payload}").EXCHANGE for payload in get_args(Payload)
}
"""Payload -> its exchange: ``EXCHANGE`` in the file that has the payload's name."""
