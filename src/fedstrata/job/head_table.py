"""The table ``[head]``: the head over the encoder in classification and regression."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PrivateAttr

from fedstrata.job.base import Table
from fedstrata.job.task_kinds import TASK_KINDS


class Head(Table):
    """``[head]``: the head over the encoder in classification and regression, with any method."""

    kind: Literal["cls", "mean", "psum", "hsum"] | None = None
    """Absent: what the checkpoint has, or the architecture's own."""
    classifier: Literal["branch", "shared"] = "branch"
    """Of psum and hsum: one for each of the four branches, or one for all."""
    pooler: bool = False
    """The encoder's pooler stands between token 0 and the classifier."""
    average: Literal["logits", "probabilities"] = "logits"
    """What is averaged over the branches to predict."""
    tokens: Literal["text", "inner", "all"] = "text"
    """Of ``mean``: the tokens of the text, those without the first and the last, or all with the padding."""
    _left: bool = PrivateAttr(default=False)

    @classmethod
    def left_behind(cls) -> Self:
        """That of a stage whose task has none: the checkpoint's is in none of the models after it."""
        made = cls()
        made._left = True
        return made

    @property
    def left(self) -> bool:
        """See :meth:`left_behind`."""
        return self._left


def misfit(average: str, tokens: str, task: str, padding: str) -> str | None:
    """Why a head does not go with the rest of a job; None where it does.

    Args:
        average: the head's.
        tokens: the head's.
        task: the kind of the job's task.
        padding: the job's ``train.padding``.
    """
    if average == "probabilities" and TASK_KINDS[task].target == "number":
        return f"[head] average: {task!r} has no probabilities; expected one of: logits"
    if tokens == "all" and padding != "max":
        return "[head] tokens: 'all' needs train.padding = 'max', else the mean depends on the batch"
    return None
