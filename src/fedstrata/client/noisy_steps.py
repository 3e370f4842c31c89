"""A step's gradients at level ``example``: clipped one by one, summed, noised (DP-SGD, Abadi et al. 2016).

An example's loss is the mean over its own predictions, so that it depends on no other example.
"""

from __future__ import annotations

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
from fedstrata.privacy.noise import gaussian, norm_of
from fedstrata.privacy.per_example import clipped_sum, tappable, tapped, whole_sum
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
            None until the first batch has shown whether the two agree.
    """

    working: WorkingModel
    task: Task
    train: Train
    autocast: Callable[[], AbstractContextManager[None]]
    noise: ExampleNoise
    still: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tapping: bool | None = field(default=None)

    def steps(
        self, examples: Examples, index: Index, masks: np.random.Generator
    ) -> Iterator[tuple[Step, list[tuple[Index, Batch]]]]:
        """The steps of one round, each with its batches and their examples; ``masks`` draws what a task draws."""
        lengths = examples.tokens.lengths
        for drawn in poisson_steps(lengths[index], self.train, self.noise.sample):
            made = []
            for chosen in (index[positions] for positions in drawn.batches):
                width = self.train.width or int(lengths[chosen].max())
                # one by one: a batch of several may see to it that something in it is masked
                single = [self.task.batch(examples, chosen[i : i + 1], masks, width) for i in range(len(chosen))]
                made.append((chosen, joined(single)))
            yield drawn, made

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
        total: Sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trained.items()}
        losses = []
        for chosen, batch in batches:
            sums, loss = self._clipped(model_pass.inputs(chosen, batch), model_pass, dropout, trained)
            losses.append(loss)
            for name, found in sums.items():
                total[name] += found
        deviation = self.noise.noise * self.noise.clip
        for name, parameter in trained.items():
            noise = gaussian(parameter.shape, deviation, self.noise.rng).to(parameter.device)
            parameter.grad = (total[name] + noise).div_(self.noise.expected).to(parameter.dtype)
        count = max(1, sum(len(chosen) for chosen, _ in batches))
        return torch.stack(losses).double().sum() / count if losses else torch.zeros((), dtype=torch.float64)

    def _clipped(
        self, batch: Batch, model_pass: ModelPass, dropout: DropoutRng, trained: Parameters
    ) -> tuple[Sums, torch.Tensor]:
        """The sum of a batch's clipped gradients, and of the examples' losses."""
        if self.tapping is None:
            self.tapping = tappable(self.working.model, trained)
            if self.tapping:
                self.tapping = self._agrees(batch, model_pass, trained)
        if self.tapping:
            with dropout.fork(), model_pass.local_model():
                return self._tapped(batch, trained)
        sums: Sums = {}
        losses = []
        for single in apart(batch):
            with dropout.fork(), model_pass.local_model():
                loss = self._backward(single)
            found = _taken(trained)
            for name, rows in self.still.items():
                found[name].index_fill_(0, rows, 0.0)
            scale = min(1.0, self.noise.clip / max(norm_of(found.values()), 1e-30))
            for name, gradient in found.items():
                sums[name] = sums[name].add_(gradient, alpha=scale) if name in sums else gradient * scale
            losses.append(loss)
        return sums, torch.stack(losses).sum()

    def _tapped(self, batch: Batch, trained: Parameters) -> tuple[Sums, torch.Tensor]:
        owners, counts = owners_of(batch)
        counts = counts.to(self.working.device)
        with tapped(self.working.model, trained, len(counts)) as calls:
            loss = self._backward(batch, max(1, int(counts.sum())))
        _taken(trained)
        owners = None if owners is None else owners.to(self.working.device)
        weights = 1 / counts.clamp(min=1).float()
        sums, _ = clipped_sum(trained, calls, owners, weights, self.noise.clip, self.still)
        return sums, loss * len(counts) / max(1, int(counts.sum()))

    def _agrees(self, batch: Batch, model_pass: ModelPass, trained: Parameters) -> bool:
        """Whether what was tapped adds up to autograd's own gradient: no use of a parameter was overlooked."""
        owners, counts = owners_of(batch)
        dropout = DropoutRng(0, self.working.device)
        try:
            with (
                dropout.fork(),
                model_pass.local_model(),
                tapped(self.working.model, trained, len(counts)) as calls,
            ):
                self._backward(batch, max(1, int(counts.sum())))
            owners = None if owners is None else owners.to(self.working.device)
            found = whole_sum(trained, calls, owners, len(counts))
        except (ValueError, RuntimeError):  # of a shape that the taps do not know
            _taken(trained)
            return False
        expected = _taken(trained)
        allowed = AGREES[self.train.precision == "bf16"]
        return all(
            norm_of([found[name].to(own.device) - own]) <= allowed * norm_of([own]) + 1e-6
            for name, own in expected.items()
        )

    def _backward(self, batch: Batch, factor: float = 1.0) -> torch.Tensor:
        """The loss of a batch times a factor; its gradients are then at the parameters."""
        batch = batch.to(self.working.device)
        with self.autocast():
            loss = factor * self.task.loss(self.working.model, batch)
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
