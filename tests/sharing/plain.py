"""Federated averaging as a plain loop over a PyTorch model, which knows nothing of parts, plans and messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedstrata.client.setup import Ready, make_ready, resolve_auto
from fedstrata.data.prepare import prepare
from fedstrata.job.file import load
from fedstrata.job.tables import Job
from roles import drawn_batches

Tensors = dict[str, torch.Tensor]


@dataclass
class Loop:
    """A job's clients, their batches as the job draws them, and one model that is filled anew for each of them."""

    job: Job
    ready: Ready

    @property
    def model(self) -> Any:
        return self.ready.loaded.model

    def start(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def train(
        self, client: str, round: int, weights: Mapping[str, torch.Tensor], frozen: Mapping[str, Any]
    ) -> Tensors:
        """A client's model after a round. ``frozen``: tensor -> True, or the rows of it that stay as they are."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])
            parameter.requires_grad_(frozen.get(name) is not True)
            parameter.grad = None
        learning = [p for p in self.model.parameters() if p.requires_grad]
        table = self.job.train
        groups = [
            {"params": [p for p in learning if p.ndim > 1], "weight_decay": table.weight_decay},
            {"params": [p for p in learning if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=table.learning_rate, fused=True)
        self.model.train()
        trainer, ready = self.ready.runtime.trainer, self.ready
        for batch in drawn_batches(trainer, ready.shards[client], ready.train, round, client):
            trainer.task.loss(self.model, batch).backward()
            for name, parameter in self.model.named_parameters():
                if isinstance(rows := frozen.get(name), torch.Tensor):
                    parameter.grad[rows] = 0
            if table.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(learning, table.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in self.model.named_parameters():
                if isinstance(rows := frozen.get(name), torch.Tensor):
                    parameter.data[rows] = weights[name][rows]
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def mean(self, models: Mapping[str, Tensors], name: str) -> torch.Tensor:
        """Of one tensor, weighted by examples."""
        counts = {client: len(self.ready.shards[client]) for client in models}
        total = sum(models[client][name].double() * count for client, count in counts.items())
        return (total / sum(counts.values())).float()


def plain_loop(config: Mapping[str, Any]) -> Loop:
    """A loop over the clients of a job, which has one stage."""
    job = resolve_auto(load(config)[0])
    assert job.model is not None
    assert job.model.name is not None
    return Loop(job, make_ready(job.model_copy(update={"output": job.output}), prepare(job), job.model.name))


def saved(folder: Any, load_model: Callable[[str], Any]) -> Tensors:
    """The tensors of a saved model."""
    return dict(load_model(str(folder)).named_parameters())
