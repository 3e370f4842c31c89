"""How a client's batches go through the model: all of it, or its head over cached hidden states.

A third way, through layers that the server holds, is in :mod:`fedstrata.exchanges.activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fedstrata.client.feature_cache import CollectedFeatures, FeatureCache
from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.cost.flops import encoder_flops, train_flops
from fedstrata.models.depth import local_depth
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.tasks import Batch

Boundary = tuple[torch.Tensor, torch.Tensor]
"""Hidden states that left a client's lower layers, and the loss's gradient by them."""
Update = Callable[[Boundary | None], None]
"""Finishes a step: the backward pass from a boundary, if there is one, and the optimizer's step."""


class ModelPass(Protocol):
    """How batches go through the model, for one client and one round or score."""

    def begin(self, span: ScheduleSpan, trained: Parameters) -> None:
        """The client's steps are about to begin; before the first one."""

    def inputs(self, chosen: Index, batch: Batch) -> Batch:
        """The batch as the model takes it; ``chosen`` are its examples."""

    def local_model(self) -> AbstractContextManager[None]:
        """Inside, the model is the plan's local model."""

    def step(self, update: Update) -> None:
        """Finish a step whose gradients stand at the parameters, or at those above a cut."""

    def wait(self) -> None:
        """Wait until the last step is finished."""

    def flops(self, parts: Parts, work: Positions) -> int:
        """FLOPs of the steps so far, over ``work``, and of all that was computed for them once."""


@dataclass
class WholePass:
    """The plan's local model, from token ids to the loss."""

    working: WorkingModel
    plan: Plan

    def begin(self, span: ScheduleSpan, trained: Parameters) -> None:
        """Nothing to prepare."""

    def inputs(self, chosen: Index, batch: Batch) -> Batch:
        """The batch as it is."""
        return batch

    @contextmanager
    def local_model(self) -> Iterator[None]:
        """The plan's layers."""
        working, plan = self.working, self.plan
        with (
            local_depth(working.model, working.parts, plan.layers),
            working.frozen_in_bf16(plan.builds(working.parts)),
        ):
            yield

    def step(self, update: Update) -> None:
        """At once."""
        update(None)

    def wait(self) -> None:
        """Nothing is under way."""

    def flops(self, parts: Parts, work: Positions) -> int:
        """The steps' own."""
        return train_flops(parts, self.plan, work)


@dataclass
class CachedPass(WholePass):
    """The head over hidden states of a frozen encoder, computed once.

    Attributes:
        cache: where they are.
        counted: tokens of the texts that the encoder has read, batch by batch.
    """

    cache: FeatureCache | CollectedFeatures
    counted: list[Index] = field(default_factory=list)

    def inputs(self, chosen: Index, batch: Batch) -> Batch:
        """The cached states in place of token ids."""
        self.counted.append(self.cache.missing(chosen))
        return replace(batch, inputs=self.cache.inputs(chosen))

    def flops(self, parts: Parts, work: Positions) -> int:
        """The encoder's too, over texts that are not in the cache, and those that were put there first."""
        encoder = sum(encoder_flops(parts, lengths) for lengths in self.counted)
        return super().flops(parts, work) + encoder


def plain_pass(
    working: WorkingModel, plan: Plan, cache: FeatureCache | None, first_participation: bool = False
) -> ModelPass:
    """The pass of a client that holds the whole model; ``cache`` is there where the encoder is frozen."""
    if cache is None:
        return WholePass(working, plan)
    return CachedPass(working, plan, cache, [cache.stored] if first_participation else [])
