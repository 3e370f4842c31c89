"""A client's batches on their way through its own layers and the server's: the client's half of a split step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache

import torch

from fedstrata.client.answer import Work
from fedstrata.client.feature_cache import FeatureCache
from fedstrata.client.model_pass import Boundary, ModelPass, Update
from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.cost.flops import train_flops
from fedstrata.models.cut import CutLayer, SplitLink, cut_at
from fedstrata.models.families import FAMILIES
from fedstrata.models.heads import HeadedModel
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.tasks import Batch
from fedstrata.tasks.batches import IGNORE_INDEX
from fedstrata.wire.changed_rows import ChangedClient
from fedstrata.wire.stream_ends import client_end


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "client")


def _finish(update: Update, boundary: Boundary | None, threads: int) -> None:
    """The rest of a step with the threads of the run: an earlier one may have had others, and torch keeps them."""
    torch.set_num_threads(threads)
    update(boundary)


@dataclass
class CutPass:
    """A client's lower and upper layers, with the server's between them.

    The rest of a step, backward through the lower layers and the optimizer's step, is the client's own alone: it
    runs in a thread beside the other clients' steps.

    Attributes:
        working: the model, which clients that take turns have in common.
        plan: the client's.
        link: the way to the server's layers.
        cut: stands in their place.
        own: the parameters that are the client's own, see :func:`own_parts`.
        finishing: the rest of the last step.
    """

    working: WorkingModel
    plan: Plan
    link: SplitLink
    cut: CutLayer
    own: Parameters = field(default_factory=dict)
    finishing: Future[None] | None = None

    def begin(self, span: ScheduleSpan, trained: Parameters) -> None:
        """Tell the server how the client's steps go."""
        self.own = self.working.parameters(own_parts(self.plan, self.working.parts))
        self.link.begin(span)

    def inputs(self, chosen: Index, batch: Batch) -> Batch:
        """The batch as it is; the cut needs its texts' lengths."""
        self.cut.lengths = batch.inputs["attention_mask"].sum(1).to(self.working.device)
        return batch

    def local_model(self) -> AbstractContextManager[None]:
        """The client's layers, with the cut in place of the server's."""
        return cut_at(self.working.model, self.working.parts, self.plan, self.cut)

    def step(self, update: Update) -> None:
        """Get the gradient by the states sent, and finish the step beside whatever others do."""
        boundary = self.cut.fetch()
        self.finishing = _background().submit(_finish, update, boundary, torch.get_num_threads())

    def wait(self) -> None:
        """Wait for the last step; then the model has this client's parameters again."""
        if self.finishing:
            self.finishing.result()
            self.working.set_parameters(self.own)

    def flops(self, parts: Parts, work: Positions) -> int:
        """The client's share of the steps'."""
        return train_flops(parts, self.plan, work)


def own_parts(plan: Plan, parts: Parts) -> list[str]:
    """The parts of the client's layers that it, or another client of the round, trains: adapters of any rank."""
    return [name for name in plan.builds(parts) if name in plan.train or parts[name].kind == "adapter"]


@dataclass(kw_only=True)
class ChangedPass(CutPass):
    """A pass whose messages leave out what tells the other side nothing new.

    Attributes:
        end: makes them.
        numbers: example -> what the server is told to know it again by: they count from the session's first text.
            An example's place in the client's data would name the same row in every round.
    """

    end: ChangedClient
    numbers: dict[int, int] = field(default_factory=dict)

    def inputs(self, chosen: Index, batch: Batch) -> Batch:
        """The batch as it is; which examples it has, and what the client reads of the server's output."""
        batch = super().inputs(chosen, batch)
        self.end.examples = torch.tensor([self.numbers.setdefault(i, len(self.numbers)) for i in chosen.tolist()])
        read = read_tokens(batch, self.working, self.plan)
        self.end.read = read[batch.inputs["attention_mask"] > 0].cpu()
        return batch


def read_tokens(batch: Batch, working: WorkingModel, plan: Plan) -> torch.Tensor:
    """At which tokens of a batch the client reads the server's output, bool ``[B, S]``; all where in doubt."""
    every = torch.ones_like(batch.inputs["attention_mask"], dtype=torch.bool)
    parts = working.parts
    if parts.layer(plan.layers[-1]) not in plan.server:
        return every  # the layers above mix the tokens
    if batch.positions is not None:
        read = torch.zeros_like(every)
        read[batch.positions] = True
        return read
    if batch.targets.shape == every.shape:
        return batch.targets != IGNORE_INDEX
    family = FAMILIES.get(parts.architecture)
    if family and family.reads_first and not isinstance(working.model, HeadedModel):
        every[:, 1:] = False
    return every


def pass_of(work: Work, cached: FeatureCache | None) -> ModelPass:
    """The client's way through its own and the server's layers."""
    assert work.link is not None
    runtime, plan = work.runtime, work.request.plan
    working, trains = runtime.working, work.request.phase == "train"
    form = runtime.stream if trains else runtime.stream.plain
    room = runtime.trainer.train.feature_cache_bytes
    end = client_end(form, working.parts.hidden, work.data.store.folder, room)
    cut = CutLayer(work.link, end)
    if isinstance(end, ChangedClient):
        return ChangedPass(working, plan, work.link, cut, end=end)
    return CutPass(working, plan, work.link, cut)
