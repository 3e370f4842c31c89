"""Tagging: a class for every word, such as named entities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedstrata.job.metrics import Predictions, scores
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.tasks.batches import IGNORE_INDEX, Batch, Examples, ids_of, pad, padded
from fedstrata.tasks.task import Predicted, TaskContext


@dataclass(frozen=True)
class Tag:
    """The task ``tag``.

    Attributes:
        padding: id of the padding token.
        labels: tags in their order; entities are written ``B-…`` and ``I-…``, everything else ``O``.
        kind: the task's name in a job file.
    """

    padding: int
    labels: tuple[str, ...]
    kind: str = "tag"
    gathers = False

    def batch(self, examples: Examples, index: Index, rng: np.random.Generator, width: int | None = None) -> Batch:
        """Pad the examples and their tags; ``rng`` is not used."""
        assert examples.labels is not None
        inputs = padded(examples.tokens, index, self.padding, width)
        offsets = examples.tokens.offsets
        tags = [examples.labels[offsets[i] : offsets[i + 1]] for i in index]
        rows, columns = inputs["input_ids"].shape
        return Batch(
            inputs=inputs,
            targets=pad(tags, IGNORE_INDEX, columns),
            work=Positions(rows * columns, rows * columns**2, rows * columns),
            origin=np.stack([examples.tokens.rows[index], index], axis=1),
        )

    def token_ids(self, examples: Examples, index: Index) -> Index:
        """The examples' own, and that of padding."""
        return ids_of(examples, index, self.padding)

    def head_positions(self, lengths: Index, width: int) -> int:
        """Every position."""
        return len(lengths) * width

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the words, in nats."""
        logits, targets = model(**batch.inputs).logits.float(), batch.targets.flatten()
        total = functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return total / (targets != IGNORE_INDEX).sum().clamp(min=1)  # the middle of a long word has none

    def score(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """The metrics of tagging over all batches, and the mean ``loss`` of the words."""
        return self.metrics(self.predict(model, batch) for batch in batches)

    def predict(self, model: nn.Module, batch: Batch) -> Predicted:
        """Tags of the words, text by text, and their summed cross-entropy in nats."""
        logits = model(**batch.inputs).logits.float()
        flat, targets = logits.flatten(0, 1), batch.targets.flatten()
        loss = float(functional.cross_entropy(flat, targets, ignore_index=IGNORE_INDEX, reduction="sum"))
        truth, guess = list[list[str]](), list[list[str]]()
        for target, guessed in zip(batch.targets.cpu().numpy(), logits.argmax(-1).cpu().numpy(), strict=True):
            words = target != IGNORE_INDEX
            truth.append([self.labels[i] for i in target[words]])
            guess.append([self.labels[i] for i in guessed[words]])
        return Predicted(truth, guess, loss, batch.origin)

    def metrics(self, predicted: Iterable[Predicted]) -> dict[str, float]:
        """See :meth:`score`."""
        every = list(predicted)
        truth, guess = whole_texts(every)
        loss = sum(batch.loss for batch in every) / max(1, sum(map(len, truth)))
        return {**scores(TASK_KINDS[self.kind].metrics, Predictions(truth, guess, loss)), "loss": loss}


def whole_texts(predicted: Sequence[Predicted]) -> tuple[list[list[str]], list[list[str]]]:
    """True and predicted tags of whole texts: the chunks of one in a row, so that no entity ends with a chunk.

    Where anything has no origin, every example is a text.
    """
    texts: dict[int, tuple[list[str], list[str]]] = {}
    chunks = [chunk for batch in predicted for chunk in zip(_origin(batch), batch.truth, batch.guess, strict=True)]
    if any(batch.origin is None for batch in predicted):
        return [truth for _, truth, _ in chunks], [guess for _, _, guess in chunks]
    for (row, _), truth, guess in sorted(chunks, key=itemgetter(0)):
        whole = texts.setdefault(row, ([], []))
        whole[0].extend(truth)
        whole[1].extend(guess)
    return [truth for truth, _ in texts.values()], [guess for _, guess in texts.values()]


def _origin(batch: Predicted) -> list[tuple[int, int]]:
    """Row and number of each example."""
    if batch.origin is None:
        return [(0, 0)] * len(batch.truth)
    return [(int(row), int(example)) for row, example in batch.origin]


def build(context: TaskContext) -> Tag:
    """The task of a job."""
    return Tag(context.padding, context.labels or (), context.job.task.kind)
