"""What a worker does, wherever it runs: play a client's request, or score its share of the test rows."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from fedstrata.client.answer import ClientData, ClientRuntime, Work, answer_request
from fedstrata.client.model_options import adapter_of
from fedstrata.client.model_pass import plain_pass
from fedstrata.client.setup import make_runtime
from fedstrata.client.trainer import drain
from fedstrata.engines.seed import Seed
from fedstrata.errors import UserError
from fedstrata.events import Encoded, Event, Stepped
from fedstrata.exchanges import EXCHANGES
from fedstrata.models.checkpoints import Loaded
from fedstrata.models.twin import empty_twin
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.tasks.task import Predicted
from fedstrata.wire.store import Store

PartKey = tuple[str, str]
"""Whose a part is, ``client`` or ``server``, and its name: on a lossy wire the two differ."""
Note = tuple[str, str, str]
"""What :data:`fedstrata.wire.store.Note` is told, its paths below the client's folder."""


@dataclass(frozen=True)
class ClientTask:
    """A request to a client.

    Attributes:
        request: what is asked; its parts have been published before.
        index: the client's training examples.
        tests: whose test examples it is scored on -> those.
        folder: the client's own disk.
    """

    request: Request
    index: Index
    tests: Mapping[str, Index]
    folder: Path

    @property
    def needs(self) -> list[PartKey]:
        """The parts that it needs; of personal ones what they begin with."""
        return [("client", part) for part in dict.fromkeys((*self.request.versions, *self.request.plan.keep))]

    @property
    def what(self) -> str:
        """The task in words."""
        return f"round {self.request.round + 1}, client {self.request.client}"


@dataclass(frozen=True)
class ScoreTask:
    """A share of the batches of test examples, to be predicted by the server's model.

    Attributes:
        plan: its model.
        parts: the parts of its model.
        tags: what each of them is known by.
        chosen: test examples.
        share: number of this share, and of shares.
    """

    plan: Plan
    parts: tuple[PartKey, ...]
    tags: Mapping[str, object]
    chosen: Index
    share: tuple[int, int]

    @property
    def needs(self) -> tuple[PartKey, ...]:
        """The parts that it needs."""
        return self.parts

    @property
    def what(self) -> str:
        """The task in words."""
        return "scoring"


@dataclass(frozen=True)
class Played:
    """A client's answer.

    Attributes:
        reply: what it sends.
        notes: of the files that it has written on its own disk.
    """

    reply: Reply
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A task that has ended in an exception, pickled."""

    error: bytes


Assignment = ClientTask | ScoreTask
Answer = Played | list[Predicted] | Failed


@dataclass
class Player:
    """Plays tasks, one after another, on a model of its own.

    Attributes:
        seed: what it is made of.
        tell: receives events.
        published: part -> its tag and tensors, as the server has published it.
    """

    seed: Seed
    tell: Callable[[Event], None]
    published: dict[PartKey, tuple[object, Tensors]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed = self.seed
        task, adapter, dropout = seed.job.task.kind, adapter_of(seed.job), seed.job.train.dropout
        model = empty_twin(seed.config, task, seed.buffers, adapter, dropout)
        loaded = Loaded(model, None, seed.parts, (), {})
        self.runtime: ClientRuntime = make_runtime(seed.job, loaded, seed.task, seed.codec)
        self.runtime.caches.on_encoded = lambda done, total: self.tell(Encoded(done, total))

    def run(self, task: Assignment) -> Answer:
        """A task's answer, to be taken before the next task is played; an exception is one too."""
        try:
            return self._play(task) if isinstance(task, ClientTask) else self._predict(task)
        except Exception as error:
            return failed(error)

    def _play(self, task: ClientTask) -> Played:
        notes: list[Note] = []

        def note(key: Path, path: Path, checksum: str) -> None:
            notes.append((str(key.relative_to(task.folder)), str(path.relative_to(task.folder)), checksum))

        seed, request = self.seed, task.request
        data = ClientData(seed.train, task.index, seed.test, task.tests, Store(task.folder, note))
        shared = {part: self.published["client", part] for _, part in task.needs}
        work = Work(self.runtime, request, shared, data, partial(self._stepped, request), copied=False)
        return Played(drain(answer_request(work, EXCHANGES[seed.exchange].handlers)), tuple(notes))

    def _stepped(self, request: Request, step: int, steps: int, loss: float, seen: int) -> None:
        self.tell(Stepped(request.round, request.client, step, steps, loss, seen))

    def _predict(self, task: ScoreTask) -> list[Predicted]:
        working = self.runtime.working
        working.load({key[1]: (task.tags[key[1]], self.published[key][1]) for key in task.parts})
        model_pass = plain_pass(working, task.plan, None)
        return self.runtime.scorer.predictions(self.seed.test, task.chosen, model_pass, task.share)


def without_weights(played: Played) -> tuple[Played, dict[tuple[str, str], torch.Tensor]]:
    """An answer without its tensors, and these by part and name."""
    weights = played.reply.weights
    flat = {(part, name): tensor for part, tensors in weights.items() for name, tensor in tensors.items()}
    empty = {part: Tensors() for part in weights}
    return replace(played, reply=replace(played.reply, weights=empty)), flat


def with_weights(played: Played, flat: Mapping[tuple[str, str], torch.Tensor]) -> Played:
    """The answer with its tensors again."""
    weights = {part: Tensors() for part in played.reply.weights}
    for (part, name), tensor in flat.items():
        weights[part][name] = tensor
    return replace(played, reply=replace(played.reply, weights=weights))


def failed(error: Exception) -> Failed:
    """An exception as an answer; one that cannot be pickled as its text."""
    if not isinstance(error, UserError):
        error.add_note("in a worker:\n" + "".join(traceback.format_tb(error.__traceback__)))
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # some can be written and not be read
    except Exception:
        content = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Failed(content)
