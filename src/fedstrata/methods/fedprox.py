"""FedProx: FedAvg with a proximal term that keeps clients close to the weights they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
https://arxiv.org/abs/1812.06127

    paper                          here
    h_k(w) = F_k(w) + mu/2 |w - w_t|^2   [train] proximal_mu = mu, over the parts both trained and sent,
                                   and in split learning over the layers at the server

Requirements, relations, cost: as FedAvg. The term is part of the local loss, so any method can use it by setting
``train.proximal_mu``; this name only presets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedstrata.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a proximal term, mu = 0.01 unless the job says otherwise."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"train": {"proximal_mu": 0.01}}
