"""Who gets which task when, with workers that are made up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from fedstrata import UserError
from fedstrata.engines.pool import DEATHS, LAST, PoolEngine

COUNT = 2
SIZES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class MadeUp:
    """Workers of which one after the other answers its oldest task; one dies of the task ``deadly``."""

    def __init__(self, deadly: int | None = None, deaths: int = 0, at_once: int = 2) -> None:
        self.at_once = at_once
        self.tasks: dict[int, deque[Any]] = {}
        self.asked: list[tuple[int, int]] = []
        """Place of each task that was given, and how many its worker had then."""
        self.deadly, self.deaths, self.started = deadly, deaths, 0

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
        if tasks[0].place == self.deadly and self.deaths:
            self.deaths -= 1
            del self.tasks[number]
            yield number, None
            return
        yield number, [tasks.popleft().place]
        self.tasks[number] = tasks


def played(workers: MadeUp) -> list[Any]:
    engine = PoolEngine(workers, COUNT, {}, {}, None, print)  # type: ignore[arg-type]
    tasks = [SimpleNamespace(place=place, what=f"task {place}") for place in range(len(SIZES))]
    return [answer for [answer] in engine._answers(tasks, SIZES)]  # type: ignore[arg-type]


def test_answers_come_in_order_and_the_largest_tasks_are_given_first() -> None:
    workers = MadeUp()
    assert played(workers) == list(range(len(SIZES)))
    assert [place for place, _ in workers.asked[:2]] == [5, 7]  # the largest of the first COUNT * AHEAD


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
    workers = MadeUp(deadly=5, deaths=DEATHS - 1)
    assert played(workers) == list(range(len(SIZES)))
    assert workers.started == COUNT + DEATHS - 1
    with pytest.raises(UserError, match="task 5: its worker died, 3 times"):
        played(MadeUp(deadly=5, deaths=DEATHS))
