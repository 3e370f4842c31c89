"""pfl-research: its simulated backend with federated averaging, on ready batches of similar length."""

from __future__ import annotations

import time
from typing import Any

import torch
from common import WORKLOAD, autocast, finish, groups, load_model, plan, tensors, to_device
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Batches(Dataset):
    """A client's examples of one round, in the batches that all peers take."""

    def __init__(self, round: int, client: int) -> None:
        super().__init__((), user_id=str(client))
        self.size, self.steps = WORKLOAD["sizes"][client], plan()["batches"][round][client]

    def __len__(self) -> int:
        return int(self.size)

    def iter(self, batch_size: int | None) -> Any:
        """The batches, whatever size is asked for."""
        return (tensors("train", index) for index in self.steps)


class Users:
    """Makes a client's data set each time that it is its turn."""

    def __init__(self) -> None:
        self.rounds = dict.fromkeys(range(len(WORKLOAD["sizes"])), 0)

    def __call__(self, client: int) -> Batches:
        """The client's examples of its next round."""
        self.rounds[client] += 1
        return Batches(self.rounds[client] - 1, client)


class Model(PyTorchModel):
    """Its model without the evaluation of every user before and after training, which no other peer does."""

    def evaluate(self, *arguments: Any, **named: Any) -> Metrics:
        """Nothing."""
        return Metrics()


def main() -> None:
    torch.manual_seed(0)
    model = load_model()
    started = time.perf_counter()

    def loss(**batch: torch.Tensor) -> torch.Tensor:
        model.train()
        with autocast():
            value: torch.Tensor = model(**to_device(batch)).loss
        return value

    model.loss, model.metrics = loss, lambda **batch: {}
    wrapped = Model(
        model,
        lambda parameters, lr: torch.optim.AdamW(groups(parameters), lr=lr, fused=True),
        torch.optim.SGD(model.parameters(), lr=1.0),
    )
    users = range(len(WORKLOAD["sizes"]))
    data = FederatedDataset(Users(), MinimizeReuseUserSampler(users))
    parameters = NNAlgorithmParams(
        central_num_iterations=WORKLOAD["rounds"],
        evaluation_frequency=WORKLOAD["rounds"] + 1,
        train_cohort_size=len(users),
        val_cohort_size=0,
    )
    FederatedAveraging().run(
        algorithm_params=parameters,
        backend=SimulatedBackend(data, data, [WeightByDatapoints()]),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=WORKLOAD["learning_rate"], local_batch_size=None
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=WORKLOAD["batch_size"]),
        callbacks=[],
    )
    del model.loss, model.metrics
    finish(model, started)


if __name__ == "__main__":
    main()
