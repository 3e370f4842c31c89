"""Who gets which task when, with workers that are made up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedstrata import UserError
from fedstrata.engines.pool import DEATHS, LAST, PoolEngine
from fedstrata.job.tables import Train
from fedstrata.plan.plan import Plan
from roles import train_request

COUNT = 2
SIZES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class MadeUp:
    """Workers of which one after the other answers its oldest task, or dies of it: place -> how often."""

    def __init__(self, deaths: Mapping[int, int] = MappingProxyType({}), at_once: int = 2) -> None:
        self.at_once = at_once
        self.tasks: dict[int, deque[Any]] = {}
        self.asked: list[tuple[int, int]] = []
        """Place of each task that was given, and how many its worker had then."""
        self.deaths, self.started = dict(deaths), 0

    def start(self) -> int:
        self.tasks[self.started] = deque()
        self.started += 1
        return self.started - 1

    def ask(self, number: int, task: Any) -> None:
        self.tasks[number].append(task)
        self.asked.append((task.place, len(self.tasks[number])))

    def messages(self) -> Iterable[tuple[int, Any]]:
        number = next(number for number, tasks in self.tasks.items() if tasks)
        self.tasks[number], tasks = deque(), self.tasks.pop(number)
        if self.deaths.get(tasks[0].place):
            self.deaths[tasks[0].place] -= 1
            del self.tasks[number]
            yield number, None
            return
        yield number, [tasks.popleft().place]
        self.tasks[number] = tasks


def played(workers: MadeUp) -> list[Any]:
    engine = PoolEngine(workers, COUNT, {}, {}, None, Train(), print)  # type: ignore[arg-type]
    tasks = [SimpleNamespace(place=place, what=f"task {place}") for place in range(len(SIZES))]
    return [answer for [answer] in engine._answers(tasks, SIZES)]  # type: ignore[arg-type]


def test_answers_come_in_order_and_the_largest_tasks_are_given_first() -> None:
    workers = MadeUp()
    assert played(workers) == list(range(len(SIZES)))
    assert [place for place, _ in workers.asked[:2]] == [5, 7]  # the largest of the first COUNT * AHEAD


@pytest.mark.parametrize(
    ("phase", "steps", "sizes"),
    [("train", None, [20, 2, 6]), ("train", 2, [8, 2, 6]), ("hidden_states", 2, [10, 1, 3])],
)
def test_rows_that_no_step_takes_are_no_work(
    phase: Any, steps: int | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with as much to do are begun in their order; others' answers would wait, a whole model each."""
    found: list[int] = []

    def answers(engine: PoolEngine, tasks: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        found.extend(sizes)
        return [SimpleNamespace(notes=[], reply=None) for _ in tasks]

    monkeypatch.setattr(PoolEngine, "_answers", answers)
    rows = {"a": 10, "b": 1, "c": 3}
    store = SimpleNamespace(folder=Path("nowhere"))
    data = {name: SimpleNamespace(index=np.arange(n), tests={}, store=store) for name, n in rows.items()}
    train = Train(epochs=2, batch_size=4, steps=steps)
    engine = PoolEngine(MadeUp(), COUNT, data, {}, None, train, print)  # type: ignore[arg-type]
    requests = [replace(train_request(Plan((), (), ())), phase=phase, client=name) for name in rows]
    list(engine.exchange(requests))
    assert found == sizes


def test_a_worker_has_a_second_task_while_many_are_left_and_never_a_third() -> None:
    workers = MadeUp()
    played(workers)
    assert max(held for _, held in workers.asked) == 2
    last = workers.asked[-COUNT * LAST :]
    assert [held for _, held in last] == [1] * len(last)
    one = MadeUp(at_once=1)
    played(one)
    assert {held for _, held in one.asked} == {1}


def test_all_tasks_of_a_worker_that_dies_are_played_again() -> None:
    workers = MadeUp({5: DEATHS - 1})
    assert played(workers) == list(range(len(SIZES)))
    assert workers.started == COUNT + DEATHS - 1
    with pytest.raises(UserError, match="task 5: its worker died, 3 times"):
        played(MadeUp({5: DEATHS}))


def test_a_task_that_had_not_begun_is_no_cause_of_a_death() -> None:
    each_dies_twice = MadeUp(dict.fromkeys(range(len(SIZES)), DEATHS - 1))
    assert played(each_dies_twice) == list(range(len(SIZES)))
