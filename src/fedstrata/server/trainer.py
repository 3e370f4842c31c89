"""The server as the one that trains: on hidden states that clients sent of their texts, in place of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedstrata.client.feature_cache import CollectedFeatures
from fedstrata.client.model_pass import CachedPass
from fedstrata.client.trainer import StepCallback, Trainer, drain
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.wire.files import clear
from fedstrata.wire.store import Store

NAME = "all"
"""Client name used in records for server-side training."""


@dataclass
class ServerTrainer:
    """Trains on the hidden states of all clients.

    Attributes:
        trainer: trains the model.
        clients: the clients' names, in their order.
        store: where the hidden states are, and the optimizer's memory.
    """

    trainer: Trainer
    clients: Sequence[str]
    store: Store
    collected: CollectedFeatures | None = field(default=None, init=False)

    def begin(self) -> None:
        """Forget what a call that was killed has been sent: who sent it may not send it again."""
        clear(self.store.folder, ("[!.]*.safetensors",))

    def take(self, client: str, tensors: Tensors) -> None:
        """Keep what a client sent: its checked ``features``, fp32, with ``tokens`` and ``labels``."""
        self.store.write(f"{client}.safetensors", tensors)

    def train(self, plan: Plan, round: int, callback: StepCallback, span: tuple[float, float]) -> Reply:
        """One round of training on everything that has come, from the weights that the model was loaded with.

        ``span`` are the shares of the run's training that are done before and after.
        """
        if self.collected is None:
            paths = [self.store.folder / f"{client}.safetensors" for client in self.clients]
            self.collected = CollectedFeatures([path for path in paths if path.exists()], self.trainer.train)
        store = self.store.optimizer
        persist = self.trainer.train.optimizer_state == "persist"
        request = Request(round, NAME, plan, "train", {}, {}, span=span)
        model_pass = CachedPass(self.trainer.working, plan, self.collected)
        steps = self.trainer.run(
            request,
            self.collected.examples(),
            self.collected.index,
            model_pass,
            store.load(round) if persist else {},
            callback,
        )
        reply, memory = drain(steps)
        if memory:
            store.save(round, memory)
        return reply
