"""The engine ``pool``: clients side by side in workers, with the bits of one process.

A worker has a model of its own, so what a client computes does not depend on who else is played. Answers are given
in the order of the requests. Of the next clients the one with most to do is begun first, so that none is waited
for at the end; how far ahead that may be is bounded, and with it the answers that wait for their turn. Clients
that have as much to do are begun in their order: then hardly an answer waits. While many are left a worker has its
next task before it has ended the last.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fedstrata.client.answer import ClientData
from fedstrata.client.steps import examples_passed
from fedstrata.engines.player import Answer, Assignment, ClientTask, Failed, PartKey, Played, ScoreTask
from fedstrata.errors import UserError
from fedstrata.events import Event
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.tasks.task import Predicted
from fedstrata.wire.chain import receive
from fedstrata.wire.codec import Wire

AHEAD = 4
"""Clients per worker that may be begun before their turn."""
LAST = 2
"""Tasks per worker that are given one by one: at the end nobody shall wait for a task beside an idle worker."""
DEATHS = 3
"""Workers that may die over one task."""


class Workers(Protocol):
    """Workers by their numbers, wherever they run.

    Attributes:
        at_once: tasks that a worker takes before it has answered; it answers them in their order.
    """

    at_once: int

    def start(self) -> int:
        """Start a worker; its number."""

    def publish(self, key: PartKey, tag: object, tensors: Tensors) -> None:
        """Make a part's tensors known to all workers, in place of those it had before."""

    def ask(self, number: int, task: Assignment) -> None:
        """Give a worker a task."""

    def messages(self) -> Iterable[tuple[int, Event | Answer | None]]:
        """Wait for messages: of a worker an event, or its answer; None if it has died."""

    def close(self) -> None:
        """End the workers."""


@dataclass
class PoolEngine:
    """Plays clients in workers.

    Attributes:
        workers: them.
        count: how many there are.
        data: client -> what it has; the order is the canonical one.
        shared: part -> (version, tensors) as up-to-date clients hold them.
        wire: how parts travel.
        train: how long a client's round is.
        tell: receives events.
    """

    workers: Workers
    count: int
    data: Mapping[str, ClientData]
    shared: dict[str, tuple[int, Tensors]]
    wire: Wire
    train: Train
    tell: Callable[[Event], None]
    tags: dict[PartKey, object] = field(default_factory=dict)
    given: dict[int, list[int]] = field(default_factory=dict)
    """Worker -> places of its tasks among those that are to be answered, in their order."""

    def __post_init__(self) -> None:
        for part, (version, tensors) in self.shared.items():
            self._publish(("client", part), version, tensors)
        self.given = {self.workers.start(): [] for _ in range(self.count)}

    def clients(self) -> list[str]:
        """The clients' names."""
        return list(self.data)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """The replies in the order of the requests, all of which are made first."""
        tasks, sizes = list[ClientTask](), list[int]()
        for request in requests:
            for part, message in request.parts.items():
                version = request.versions[part]
                if self.shared[part][0] != version:
                    self.shared[part] = version, receive(self.wire, message, self.shared[part])
                if self.tags["client", part] != version:
                    self._publish(("client", part), *self.shared[part])
            data = self.data[request.client]
            tests = data.tests if request.phase == "evaluate" else {}
            tasks.append(ClientTask(replace(request, parts={}), data.index, tests, data.store.folder))
            whole = sum(map(len, tests.values())) or len(data.index)
            sizes.append(examples_passed(whole, self.train) if request.phase == "train" else whole)
        for task, answer in zip(tasks, self._answers(tasks, sizes), strict=True):
            store = self.data[task.request.client].store
            for key, path, checksum in answer.notes:
                store.note(store.folder / key, store.folder / path, checksum)
            yield answer.reply

    def predictions(
        self,
        plan: Plan,
        weights: Mapping[str, tuple[object, Tensors]],
        chosen: Index,
    ) -> list[Predicted]:
        """The server's model on test examples, batch by batch: :meth:`fedstrata.client.scorer.Scorer.predictions`.

        Args:
            plan: its model.
            weights: part -> tag and tensors.
            chosen: the test examples that count.
        """
        keys = list[PartKey]()
        for part, (tag, tensors) in weights.items():
            keys.append(("client" if isinstance(tag, int) else "server", part))
            if self.tags.get(keys[-1]) != tag:
                self._publish(keys[-1], tag, tensors)
        tags = {part: tag for part, (tag, _) in weights.items()}
        tasks = [ScoreTask(plan, tuple(keys), tags, chosen, (i, self.count)) for i in range(self.count)]
        answers: list[list[Predicted]] = list(self._answers(tasks, [0] * len(tasks)))
        return [answers[i % self.count][i // self.count] for i in range(sum(map(len, answers)))]

    def _publish(self, key: PartKey, tag: object, tensors: Tensors) -> None:
        self.workers.publish(key, tag, tensors)
        self.tags[key] = tag

    def _answers(self, tasks: Sequence[Assignment], sizes: Sequence[int]) -> Iterator[Any]:
        """The answers in the order of the tasks."""
        answers, deaths = dict[int, Answer](), Counter[int]()
        waiting, begun = list[int](), 0
        for due in range(len(tasks)):
            while due not in answers:
                ahead = min(len(tasks), due + AHEAD * self.count)
                waiting += range(begun, ahead)
                begun = max(begun, ahead)
                while waiting and (number := self._free(len(waiting))) is not None:
                    largest = max(waiting, key=lambda i: (sizes[i], -i))
                    waiting.remove(largest)
                    self.given[number].append(largest)
                    self.workers.ask(number, tasks[largest])
                for number, message in self.workers.messages():
                    if message is None:
                        waiting += self._lost(number, deaths, tasks)
                    elif isinstance(message, Failed) and not self.given[number]:
                        _checked(message)  # it could not be made
                    elif isinstance(message, Played | list | Failed):
                        answers[self.given[number].pop(0)] = message
                    else:
                        self.tell(message)
            yield _checked(answers.pop(due))

    def _free(self, waiting: int) -> int | None:
        """A worker that is to have another task, a new one where another has died; None if all have enough."""
        if len(self.given) < self.count:
            self.given[self.workers.start()] = []
        number = min(self.given, key=lambda each: len(self.given[each]))
        most = self.workers.at_once if waiting > self.count * LAST else 1
        return number if len(self.given[number]) < most else None

    def _lost(self, number: int, deaths: Counter[int], tasks: Sequence[Assignment]) -> list[int]:
        """A worker has died: the places of its tasks, which are to be played again."""
        places = self.given.pop(number)
        for place in places[:1]:  # the others had not begun
            deaths[place] += 1
            if deaths[place] == DEATHS:
                raise UserError(
                    f"{tasks[place].what}: its worker died, {DEATHS} times over; unless a traceback says why, "
                    "it takes less memory with fewer engine.workers and --resume, or with a smaller "
                    "train.batch_size in another folder"
                )
        return places


def _checked(answer: Answer) -> Any:
    """An answer, unless it is an exception."""
    if isinstance(answer, Failed):
        raise pickle.loads(answer.error)
    return answer
