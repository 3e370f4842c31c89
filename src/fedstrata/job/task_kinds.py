"""The kinds of tasks: all that the job, the data and the model have to know of each, without torch.

A new kind is its entry in :data:`TASK_KINDS`, a file in ``fedstrata.tasks`` with its batches and its loss, and
that file's line in ``fedstrata.tasks.TASKS``. Nothing else has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fedstrata.job.metrics import CLASSIFICATION, LANGUAGE_MODELING, REGRESSION, TAGGING, Metric

Target = Literal["token", "class", "number", "tag"]


@dataclass(frozen=True)
class TaskKind:
    """One kind of task.

    Attributes:
        target: what is predicted: a ``token`` of the text itself, which needs no labels; a ``class`` or a
            ``number`` of each example; or a ``tag`` of each word.
        model: name of the Hugging Face class of its models.
        metrics: metric -> function; the first is the default of ``task.metric``. Larger is better but for those of
            :data:`fedstrata.plan.kinds.LOWER_IS_BETTER`.
        texts: how many text columns it may read; empty for any number, joined with blanks.
        long_text: default of ``data.long_text``.
        heads: a head of the job's ``[head]`` can stand over its encoder.
        attention: what a token must be predicted from: text on both sides of it (``bidirectional``) or before it
            (``causal``); None if any model will do.
    """

    target: Target
    model: str
    metrics: Mapping[str, Metric]
    texts: tuple[int, ...] = (1,)
    long_text: Literal["chunk", "truncate"] = "truncate"
    heads: bool = False
    attention: Literal["bidirectional", "causal"] | None = None

    @property
    def labeled(self) -> bool:
        """Whether its rows need labels."""
        return self.target != "token"

    @property
    def masks(self) -> bool:
        """Whether tokens of a text are masked and predicted from those on both sides."""
        return self.target == "token" and self.attention == "bidirectional"

    @property
    def classes(self) -> bool:
        """Whether its labels are names of classes."""
        return self.target in ("class", "tag")

    @property
    def words(self) -> bool:
        """Whether a text is a list of words, each with a label of its own."""
        return self.target == "tag"


CLASSIFIER = "AutoModelForSequenceClassification"
TASK_KINDS: dict[str, TaskKind] = {
    "mlm": TaskKind(
        target="token",
        model="AutoModelForMaskedLM",
        metrics=LANGUAGE_MODELING,
        texts=(),
        long_text="chunk",
        attention="bidirectional",
    ),
    "clm": TaskKind(
        target="token",
        model="AutoModelForCausalLM",
        metrics=LANGUAGE_MODELING,
        texts=(),
        long_text="chunk",
        attention="causal",
    ),
    "classify": TaskKind("class", CLASSIFIER, CLASSIFICATION, heads=True),
    "pair": TaskKind("class", CLASSIFIER, CLASSIFICATION, texts=(2,), heads=True),
    "regress": TaskKind("number", CLASSIFIER, REGRESSION, texts=(1, 2), heads=True),
    "tag": TaskKind("tag", "AutoModelForTokenClassification", TAGGING, long_text="chunk"),
}
"""Name in a job file -> kind. May be added to from outside, before a job is loaded."""


def named(which: Callable[[TaskKind], bool]) -> str:
    """The names of some kinds, as ``a, b and c``."""
    found = [name for name, kind in TASK_KINDS.items() if which(kind)]
    return f"{', '.join(found[:-1])} and {found[-1]}" if len(found) > 1 else "".join(found)
