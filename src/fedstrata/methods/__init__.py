"""The methods, by their names in a job file."""

from __future__ import annotations

from fedstrata.methods.centralized import Centralized
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedavgm import FedAvgM
from fedstrata.methods.fedbert import FedBERT
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.methods.fedbt import FedBT
from fedstrata.methods.fedfreezebert import FedFreezeBERT
from fedstrata.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedstrata.methods.fedprox import FedProx
from fedstrata.methods.fedsplitbert import FedSplitBERT
from fedstrata.methods.local import Local
from fedstrata.methods.none import NoTraining
from fedstrata.methods.single import Single
from fedstrata.plan.plan import Method

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "none": NoTraining,
    "centralized": Centralized,
    "single": Single,
    "local": Local,
    "fedbfpt": FedBFPT,
    "fedbt": FedBT,
    "fedsplitbert": FedSplitBERT,
    "fedfreezebert": FedFreezeBERT,
    "fedbert": FedBERT,
}
