"""A stage made ready to be audited: its model as the server holds it, texts of a client and of the public."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedstrata.client.answer import ClientRuntime
from fedstrata.client.private import noise_of
from fedstrata.client.setup import Ready
from fedstrata.data.prepare import Prepared
from fedstrata.events import Event
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.exchange import Exchange
from fedstrata.job.tables import Job
from fedstrata.models.depth import local_depth
from fedstrata.plan.kinds import Index, Weights
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.runs.start import start_weights
from fedstrata.tasks import Examples


@dataclass(frozen=True)
class Bench:
    """A stage, its model and its texts.

    Attributes:
        job: the stage's job, every "auto" resolved.
        data: its rows.
        ready: its model and examples.
        client: the audited client.
        public: examples of public text, with labels that were drawn where the task has some.
        folder: for what the client's code writes.
        tell: receives events.
        round: the one that is played, 0-based.
        begins: the model before it; None for the start model.
    """

    job: Job
    data: Prepared
    ready: Ready
    client: str
    public: Examples
    folder: Path
    tell: Callable[[Event], None]
    round: int = 0
    begins: Weights | None = None

    @cached_property
    def start(self) -> Weights:
        """The model as server and client hold it before the round."""
        return start_weights(self.ready.runtime) if self.begins is None else self.begins

    @property
    def parts(self) -> Parts:
        """The model's parts."""
        return self.ready.loaded.parts

    @property
    def exchange(self) -> Exchange:
        """The payload's protocol."""
        return EXCHANGES[self.job.method.exchange]

    @cached_property
    def plan(self) -> Plan:
        """The client's plan of the round."""
        streams = self.ready.runtime.trainer.streams
        return make_plan(self.job.method, self.parts, self.job.task.kind, self.round, self.client, streams)

    @property
    def span(self) -> tuple[float, float]:
        """The shares of the run's learning-rate schedule that are done before the round and after it."""
        rounds = max(1, self.job.method.rounds)
        return self.round / rounds, (self.round + 1) / rounds

    @property
    def lowest(self) -> int:
        """The layer that stands right above the embeddings in the client's local model."""
        return self.plan.layers[0]

    def local_layers(self) -> AbstractContextManager[None]:
        """Inside, the model has the layers of the client's local model alone, in their order."""
        return local_depth(self.ready.loaded.model, self.parts, self.plan.layers)

    @property
    def index(self) -> Index:
        """The client's examples."""
        return self.ready.shards[self.client]

    @cached_property
    def runtime(self) -> ClientRuntime:
        """What plays the client, always with the noise of its own rounds: of fewer texts there would be more."""
        runtime, private = self.ready.runtime, self.ready.runtime.private
        if private is None:
            return runtime
        noise = noise_of(private.table, private.train, len(self.index))
        table = private.table.model_copy(update={"noise": noise, "epsilon": None})
        return replace(runtime, private=replace(private, table=table))

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.ready.loaded.model.config.vocab_size)

    @cached_property
    def special(self) -> Index:
        """Token ids that stand in every text, and tell nothing."""
        return np.asarray(sorted(self.ready.loaded.tokenizer.all_special_ids), dtype=np.int64)

    @cached_property
    def frequencies(self) -> Index:
        """How often each token stands in the public text, special ones never, ``[V]``."""
        counts = np.bincount(self.public.tokens.ids, minlength=self.vocabulary)[: self.vocabulary].astype(np.int64)
        counts[self.special] = 0
        return counts

    @cached_property
    def ordinary(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which token ids are not special, ``[V]``."""
        mask = np.ones(self.vocabulary, dtype=bool)
        mask[self.special] = False
        return mask

    @contextmanager
    def model(self) -> Iterator[torch.nn.Module]:
        """The start model in evaluation mode; no gradients inside."""
        working = self.ready.runtime.working
        working.load({part: (None, tensors) for part, tensors in self.start.items()})
        was = working.model.training
        working.model.eval()
        try:
            with torch.no_grad():
                yield working.model
        finally:
            working.model.train(was)
