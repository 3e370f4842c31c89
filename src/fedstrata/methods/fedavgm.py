"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification. 2019.
https://arxiv.org/abs/1909.06335

    paper                     here
    v <- beta v + dw          [server] optimizer = "momentum", momentum = beta

Requirements, relations, cost: as FedAvg; the momentum never leaves the server. Any method works with this server
optimizer; this name only presets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedstrata.methods.fedavg import FedAvg


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"server": {"optimizer": "momentum"}}
