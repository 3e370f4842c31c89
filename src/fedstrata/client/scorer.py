"""Scores the loaded model on test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedstrata.client.feature_cache import ROWS, FeatureCache, encoder_digest
from fedstrata.client.model_pass import ModelPass
from fedstrata.client.trainer import autocast
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.batching import batches, token_batches
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index
from fedstrata.plan.streams import EVALUATE, SERVER, Streams
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.tasks.task import Predicted, is_spread

Keep = Callable[[Index, list[Predicted]], None]
"""Takes the test examples that were scored and what was predicted, batch by batch."""


@dataclass
class Scorer:
    """Scores a model.

    Attributes:
        working: the model, loaded.
        task: makes batches and scores.
        train: the job's ``[train]``: precision, padding, and the size of batches, here twice that of training.
        streams: all randomness; the masks are the same in every round.
    """

    working: WorkingModel
    task: Task
    train: Train
    streams: Streams

    def run(
        self, examples: Examples, chosen: Index | None, model_pass: ModelPass, keep: Keep | None = None
    ) -> dict[str, float]:
        """The loaded model on all ``examples`` or the chosen ones, by the task's metrics.

        Of each pool of the examples the same again, as ``METRIC.POOL``.

        Args:
            examples: the test examples.
            chosen: those that count; None for all.
            model_pass: the way through the model.
            keep: takes the predictions behind each score, where the task gives them one by one.
        """
        return scores_by_pool(examples, chosen, lambda inside: self._score(examples, inside, model_pass, keep))

    def predictions(
        self, examples: Examples, chosen: Index | None, model_pass: ModelPass, share: tuple[int, int]
    ) -> list[Predicted]:
        """What the loaded model predicts for the batches of :meth:`run`, one by one.

        Of ``share`` ``(i, n)`` every n-th batch from the i-th on. The task must be a
        :class:`fedstrata.tasks.task.SpreadTask`.
        """
        assert is_spread(self.task)
        chosen = np.arange(len(examples)) if chosen is None else chosen
        with self._scoring(model_pass):
            own = self._batches(examples, chosen, model_pass, share)
            return [self.task.predict(self.working.model, batch) for batch in own]

    def _score(
        self, examples: Examples, chosen: Index, model_pass: ModelPass, keep: Keep | None
    ) -> dict[str, float]:
        if is_spread(self.task):
            found = self.predictions(examples, chosen, model_pass, (0, 1))
            if keep:
                keep(chosen, found)
            return self.task.metrics(found)
        with self._scoring(model_pass):
            return self.task.score(self.working.model, self._batches(examples, chosen, model_pass))

    @contextmanager
    def _scoring(self, model_pass: ModelPass) -> Iterator[None]:
        self.working.model.eval()
        with torch.inference_mode(), model_pass.local_model(), autocast(self.working.device, self.train):
            yield

    def _batches(
        self, examples: Examples, chosen: Index, model_pass: ModelPass, share: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """The batches of a share; all are made, as their masks are drawn one after another."""
        rng = self.streams.numpy(-1, SERVER, EVALUATE)
        for number, index in enumerate(scored_batches(examples, chosen, self.train)):
            batch = self.task.batch(examples, index, rng, self.train.width)
            if number % share[1] == share[0]:
                yield model_pass.inputs(index, batch).to(self.working.device)


def scored_batches(examples: Examples, chosen: Index, train: Train) -> list[Index]:
    """The chosen test examples of each batch, in the order in which they are scored."""
    lengths, budget = examples.tokens.lengths[chosen], train.tokens_per_batch
    size = 2 * train.batch_size
    if budget is None:
        order = batches(lengths, size, None)
    else:
        widths = lengths if train.width is None else np.full_like(lengths, train.width)
        order = token_batches(widths, 2 * budget, None)
    return [chosen[positions] for positions in order]


def scores_by_pool(
    examples: Examples, chosen: Index | None, score: Callable[[Index], dict[str, float]]
) -> dict[str, float]:
    """The scores of the chosen ``examples`` (None: all), and of each pool among them, as ``METRIC.POOL``."""
    chosen = np.arange(len(examples)) if chosen is None else chosen
    scores = score(chosen)
    for pool, members in examples.pools.items():
        if len(inside := np.intersect1d(chosen, members)):
            scores |= {f"{metric}.{pool}": value for metric, value in score(inside).items()}
    return scores


class FeatureCaches:
    """The feature caches of a process, by folder; each is opened once.

    Args:
        working: the model, whose encoder is frozen.
        task: makes batches.
        train: the job's ``[train]``.
        on_encoded: called as texts are encoded to be cached: how many are, and of how many.
    """

    def __init__(
        self, working: WorkingModel, task: Task, train: Train, on_encoded: Callable[[int, int], None]
    ) -> None:
        self.working, self.task, self.train, self.on_encoded = working, task, train, on_encoded
        self._open: dict[Path, FeatureCache] = {}

    def open(self, examples: Examples, index: Index, folder: Path, rows: int = ROWS) -> FeatureCache:
        """The cache in a folder, of the hidden states of some examples; made if it is not there.

        ``rows``: most of them that go through the encoder together.
        """
        if folder not in self._open:
            self._open[folder] = FeatureCache(
                self.working,
                self.task,
                self.train,
                examples,
                index,
                folder,
                self.on_encoded,
                self._encoder,
                rows,
            )
        return self._open[folder]

    @cached_property
    def _encoder(self) -> str:
        """Of a frozen encoder, whose weights are hashed once for all clients."""
        return encoder_digest(self.working.model)
