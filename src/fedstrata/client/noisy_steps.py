"""A step's gradients at level ``example``: clipped one by one, summed, noised (DP-SGD, Abadi et al. 2016).

An example's loss is the mean over its own predictions, so that it depends on no other example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.model_pass import ModelPass
from fedstrata.client.poisson import poisson_steps
from fedstrata.client.private import ExampleNoise
from fedstrata.client.steps import Step
from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.privacy.noise import DIVERGED, LOG, add_gaussian, norm_of
from fedstrata.privacy.per_example import (
    add_clipped,
    add_whole,
    backward,
    by_example,
    tappable,
    tapped,
    whole_sum,
    zeros,
)
from fedstrata.privacy.uses import Call
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.tasks.batches import IGNORE_INDEX

Sums = dict[str, torch.Tensor]
AGREES = {False: 1e-3, True: 5e-2}
"""How far the tapped sum may be from autograd's, relative to its norm; in bf16 autograd itself rounds."""


@dataclass
class NoisySteps:
    """The gradients of one client's round.

    Attributes:
        working: the model.
        task: makes batches and losses.
        train: the job's ``[train]``.
        autocast: makes the context of the forward pass.
        noise: how the round is noised.
        still: trained tensor -> its rows that stay as they are, ``[n]`` int64; they do not count in a norm.
        tapping: gradients come from one backward pass; else from one for each example, which always holds.
            None until the first batch of several examples has shown whether the two agree.
        told: that gradients were not finite has been said.
        total: the sum of a step's gradients, and then its noised mean; empty before the first step.
    """

    working: WorkingModel
    task: Task
    train: Train
    autocast: Callable[[], AbstractContextManager[None]]
    noise: ExampleNoise
    still: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tapping: bool | None = field(default=None)
    told: bool = field(default=False, init=False)
    total: Sums = field(default_factory=dict, init=False)

    def steps(self, examples: Examples, index: Index) -> Iterator[tuple[Step, list[tuple[Index, Batch]]]]:
        """The steps of one round, each with its batches and their examples."""
        lengths, masks = examples.tokens.lengths, self.noise.masks
        for drawn in poisson_steps(lengths[index], self.train, self.noise.sample):
            made = []
            for chosen in (index[positions] for positions in self._passes(drawn.batches)):
                width = self.train.width or int(lengths[chosen].max())
                # one by one: a batch of several may see to it that something in it is masked
                single = [self.task.batch(examples, chosen[i : i + 1], masks, width) for i in range(len(chosen))]
                made.append((chosen, joined(single)))
            yield drawn, made

    def _passes(self, batches: Sequence[Index]) -> Iterator[Index]:
        """A step's batches as they go through the model."""
        for batch in batches:
            yield from np.split(batch, len(batch)) if self.noise.alone else [batch]

    def gradients(
        self,
        batches: Sequence[tuple[Index, Batch]],
        model_pass: ModelPass,
        dropout: DropoutRng,
        trained: Parameters,
    ) -> torch.Tensor:
        """Put the noised mean of the clipped gradients at the parameters; the mean loss."""
        model_pass.wait()
        self.working.model.train()
        total = self.total = self.total or zeros(trained)  # kept: fresh memory takes longer than zeros
        for gradient in total.values():
            gradient.zero_()
        losses = [
            self._add_clipped(total, model_pass.inputs(chosen, batch), model_pass, dropout, trained)
            for chosen, batch in batches
        ]
        deviation = self.noise.noise * self.noise.clip
        for name, parameter in trained.items():
            add_gaussian(total[name], deviation, self.noise.stream)
            parameter.grad = total[name].div_(self.noise.expected).to(parameter.dtype)
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.working.device)  # where the other steps' are
        return torch.stack(losses).double().sum() / sum(len(chosen) for chosen, _ in batches)

    def _add_clipped(
        self, total: Sums, batch: Batch, model_pass: ModelPass, dropout: DropoutRng, trained: Parameters
    ) -> torch.Tensor:
        """Add a batch's clipped gradients to ``total``; the sum of the examples' losses."""
        if self.tapping is None and not tappable(self.working.model, trained):
            self.tapping = False
        if self.tapping is not False:
            with dropout.fork(), model_pass.local_model():
                loss = self._add_tapped(total, batch, trained)
            if loss is not None:
                return loss
        losses = []
        for single in apart(batch):
            with dropout.fork(), model_pass.local_model():
                losses.append(self._backward(single))
            found = _taken(trained)
            for name, rows in self.still.items():
                found[name].index_fill_(0, rows, 0.0)
            add_whole(total, found, norm := norm_of(found.values()), self.noise.clip)
            self._tell(math.isfinite(norm))
        return torch.stack(losses).sum()

    def _add_tapped(self, total: Sums, batch: Batch, trained: Parameters) -> torch.Tensor | None:
        """The same from one backward pass. None, and nothing added, where that fails, or is not known to hold."""
        owners, counts = owners_of(batch)
        if self.tapping is None and len(counts) == 1:
            return None  # whatever was tapped adds up to the gradient of a single example
        owners = None if owners is None else owners.to(self.working.device)
        counts = counts.to(self.working.device)
        predictions = max(1, int(counts.sum()))
        try:
            with tapped(self.working.model, trained, len(counts)) as calls:
                loss = self._loss(batch, predictions)
            own = backward(loss, calls, {} if self.tapping else trained)
            if self.tapping is None:
                found = whole_sum(trained, calls, owners, len(counts))
                self.tapping = self._agree(own, found) and self._by_example(batch, trained, calls, owners, counts)
            if self.tapping:
                weights = 1 / counts.clamp(min=1).float()
                norms = add_clipped(total, trained, calls, owners, weights, self.noise.clip, self.still)
                self._tell(bool(norms.isfinite().all()))
                return loss.detach() * len(counts) / predictions
        except (ValueError, RuntimeError) as error:  # of a shape that the taps do not know
            if self.tapping and not isinstance(error, ValueError):
                raise
            self.tapping = False
        return None

    def _tell(self, finite: bool) -> None:
        """Tell this machine alone, once, of a gradient that is not finite: a message that told it has no noise."""
        if not finite and not self.told:
            self.told = True
            LOG.warning("gradients of examples are not finite and count for nothing; %s", DIVERGED)

    def _by_example(
        self,
        batch: Batch,
        trained: Parameters,
        calls: list[Call],
        owners: torch.Tensor | None,
        counts: torch.Tensor,
    ) -> bool:
        """Whether what was tapped is by example, which one of the batch's shows by itself.

        It is the one with the fewest predictions: any other may have as many as all together.
        """
        fewest = int(counts.argmin())
        self.working.model.eval()  # draws nothing for dropout
        with tapped(self.working.model, trained, 1) as alone:
            self._loss(apart(batch)[fewest])
        self.working.model.train()
        return by_example(calls, owners, len(counts), alone, int(counts[fewest]))

    def _agree(self, own: Sums, found: Sums) -> bool:
        """Whether what was tapped adds up to autograd's own gradient: no use of a parameter was overlooked.

        What was found is overwritten.
        """
        allowed = AGREES[self.train.precision == "bf16"]
        return all(
            norm_of([found[name].sub_(gradient)]) <= allowed * norm_of([gradient]) + 1e-6
            for name, gradient in own.items()
        )

    def _loss(self, batch: Batch, factor: float = 1.0) -> torch.Tensor:
        """The loss of a batch times a factor."""
        with self.autocast():
            return factor * self.task.loss(self.working.model, batch.to(self.working.device))

    def _backward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch; its gradients are then at the parameters."""
        loss = self._loss(batch)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return loss.detach()


def _taken(trained: Parameters) -> Sums:
    """The gradients at the parameters, fp32, which are then without."""
    found = {}
    for name, parameter in trained.items():
        found[name] = (
            torch.zeros_like(parameter, dtype=torch.float32) if parameter.grad is None else parameter.grad.float()
        )
        parameter.grad = None
    return found


def joined(single: Sequence[Batch]) -> Batch:
    """One batch of several that are equally wide."""
    positions = [each.positions for each in single if isinstance(each.positions, torch.Tensor)]
    return Batch(
        inputs={name: torch.cat([each.inputs[name] for each in single]) for name in single[0].inputs},
        targets=torch.cat([each.targets for each in single]),
        positions=torch.cat(positions) if positions else None,
        work=sum((each.work for each in single), Positions()),
    )


def apart(batch: Batch) -> list[Batch]:
    """A batch's examples, each as a batch."""
    owners, counts = owners_of(batch)
    targets = torch.split(batch.targets, counts.tolist() if owners is not None else 1)
    return [
        replace(
            batch,
            inputs={name: tensor[i : i + 1] for name, tensor in batch.inputs.items()},
            targets=targets[i],
            positions=batch.positions[i : i + 1] if isinstance(batch.positions, torch.Tensor) else None,
        )
        for i in range(len(counts))
    ]


def owners_of(batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The example of each position where a token is predicted, None without any; and each one's predictions."""
    if isinstance(batch.positions, torch.Tensor):
        return batch.positions.nonzero()[:, 0], batch.positions.sum(1)
    if batch.targets.ndim == 2:
        return None, (batch.targets != IGNORE_INDEX).sum(1)
    return None, torch.ones(len(batch.targets), dtype=torch.long)
