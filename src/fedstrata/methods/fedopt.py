"""FedAdam, FedYogi, FedAdagrad: FedAvg with an adaptive optimizer at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021.
https://arxiv.org/abs/2003.00295

    paper (Algorithm 2)       here
    Delta_t                   weighted mean of the replies minus the server's weights
    beta1, beta2, tau, eta    [server] momentum, beta2, tau, learning_rate

Requirements, relations, cost: as FedAvg; the optimizer's state never leaves the server, so nothing more is sent.
Any method works with these server optimizers; the names only preset them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedstrata.methods.fedavg import FedAvg


class FedAdam(FedAvg):
    """FedAvg with Adam at the server."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"server": {"optimizer": "adam"}}


class FedYogi(FedAvg):
    """FedAvg with Yogi at the server."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"server": {"optimizer": "yogi"}}


class FedAdagrad(FedAvg):
    """FedAvg with Adagrad at the server."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"server": {"optimizer": "adagrad"}}
