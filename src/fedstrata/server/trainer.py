"""The server as the one that trains: on what clients sent of their texts, in place of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedstrata.client.feature_cache import CollectedFeatures
from fedstrata.client.trainer import StepCallback, Worker, finish
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply
from fedstrata.plan.plan import Plan
from fedstrata.wire.codec import WireError, check, dequantize
from fedstrata.wire.store import Store, write_tensors

NAME = "all"
"""Under which the server's training is recorded."""


@dataclass
class ServerTrainer:
    """Features of all clients, and a model to train on them.

    Attributes:
        worker: the model.
        clients: the clients' names, in their order.
        classes: number of classes; None where the labels are numbers.
        dtype: the wire type.
        folder: where the features stand.
    """

    worker: Worker
    clients: Sequence[str]
    classes: int | None
    dtype: str
    folder: Path

    def __post_init__(self) -> None:
        self.received: CollectedFeatures | None = None

    def take(self, client: str, message: Tensors) -> None:
        """Check what a client sent and keep it.

        Raises:
            WireError: it is not what :func:`fedstrata.client.feature_cache.message` makes for this model and task.
        """
        tokens, labels = message.get("tokens"), message.get("labels")
        if tokens is None or labels is None or tokens.ndim != 1 or labels.shape != tokens.shape:
            raise WireError("tokens and labels: must be one number for each text")
        if tokens.dtype != torch.int32 or len(tokens) == 0 or int(tokens.min()) < 1:
            raise WireError("tokens: must be whole numbers above 0 (int32)")
        model = self.worker.model
        shape = (int(tokens.sum()), model.branches, model.config.hidden_size)
        rest = {name: tensor for name, tensor in message.items() if name not in ("tokens", "labels")}
        check(rest, {"features": shape}, self.dtype)
        if self.classes is None and (labels.dtype != torch.float32 or not torch.isfinite(labels).all()):
            raise WireError("labels: must be finite numbers (fp32)")
        if self.classes is not None and (
            labels.dtype != torch.int32 or int(labels.min()) < 0 or int(labels.max()) >= self.classes
        ):
            raise WireError(f"labels: must be classes from 0 to {self.classes - 1} (int32)")
        write_tensors(self._path(client), {**dequantize(rest), "tokens": tokens, "labels": labels})

    def train(self, plan: Plan, round: int, told: StepCallback, span: tuple[float, float]) -> Reply:
        """One round of training on everything that has come, from the weights that the model was loaded with.

        ``span`` are the shares of the run's training that are done before and after.
        """
        if self.received is None:
            paths = [self._path(client) for client in self.clients]
            self.received = CollectedFeatures([path for path in paths if path.exists()], self.worker.train)
        examples = self.received.examples()
        worker, index, store = self.worker, self.received.index, Store(self.folder / "optimizer")
        memory = store.load(round) if worker.train.optimizer_state == "persist" else {}
        reply, memory = finish(
            worker.training(plan, round, NAME, examples, index, told, kept=self.received, span=span, memory=memory)
        )
        if memory:
            store.save(round, memory)
        return reply

    def _path(self, client: str) -> Path:
        return self.folder / f"{client}.safetensors"
