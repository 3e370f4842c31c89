"""Tasks: what is learned. Each turns examples into batches, batches into a loss, and predictions into scores.

A new task is one file here and its line in :data:`TASKS`; and its entry in
:data:`fedstrata.job.task_kinds.TASK_KINDS`, which says what must be known of it before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from fedstrata.tasks import classify, clm, mlm, regress, tag
from fedstrata.tasks.batches import Batch, Examples
from fedstrata.tasks.task import Task, TaskContext

__all__ = ["TASKS", "Batch", "Examples", "Task", "TaskContext", "build_task"]

TASKS: dict[str, Callable[[TaskContext], Task]] = {
    "mlm": mlm.build,
    "clm": clm.build,
    "classify": classify.build,
    "pair": classify.build,
    "regress": regress.build,
    "tag": tag.build,
}
"""Kind -> what builds its task. May be added to from outside."""


def build_task(context: TaskContext) -> Task:
    """The task of a job.

    Raises:
        UserError: the tokenizer or the class names do not fit the task.
    """
    return TASKS[context.job.task.kind](context)
