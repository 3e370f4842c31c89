"""What the final model predicts on the test rows: a confusion matrix, a line per class, and each prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.client.model_pass import plain_pass
from fedstrata.client.scorer import Keep, scored_batches
from fedstrata.client.setup import Ready
from fedstrata.job.confusion import class_scores, confusion, counts
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.plan import Plan
from fedstrata.tasks.batches import Examples
from fedstrata.tasks.tag import whole_texts
from fedstrata.tasks.task import Predicted
from fedstrata.wire.files import write_bytes

CLASSES = "classes.json"
PREDICTIONS = "predictions.jsonl"


class LastPredictions:
    """The predictions of the last score over all test examples.

    Attributes:
        found: batch by batch; None before the first score.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.found: list[Predicted] | None = None

    def keep(self, chosen: Index, found: list[Predicted]) -> None:
        """Take the predictions of a score; those of a part of the examples are not kept."""
        if len(chosen) == self.examples:
            self.found = found


def wants_predictions(job: Job) -> bool:
    """Whether anything is written of what a model predicts for the rows of a stage."""
    target = TASK_KINDS[job.task.kind].target
    return target != "token" and (target != "number" or job.output.predictions)


def score_whole(ready: Ready, weights: Tensors, plan: Plan, keep: Keep) -> None:
    """Score a model that its only client keeps, for what it predicts.

    Args:
        ready: the stage's model and examples.
        weights: the whole model's.
        plan: the client's.
        keep: takes the predictions.
    """
    working = ready.runtime.working
    working.load(dict.fromkeys(working.parts.names, (None, weights)))
    whole = replace(plan, layers=tuple(range(working.parts.depth)), server=())
    ready.runtime.scorer.run(ready.test, None, plain_pass(working, whole, None), keep)


def write_predictions(
    job: Job, ready: Ready, labels: Sequence[str] | None, last: LastPredictions | None, folder: Path
) -> str:
    """Write what the final model predicts, as far as there is one and it predicts rows.

    Args:
        job: the stage's job.
        ready: its model and examples.
        labels: class names in order; None where the task has none.
        last: of the last score; None where clients scored models, or rows, of their own.
        folder: the stage's output folder.

    Returns:
        Why nothing is written though the job asks for it, a sentence; else empty.
    """
    why = ""
    if TASK_KINDS[job.task.kind].target == "token":
        why = "a language model predicts every token"
    elif last is None:
        whose = "on rows of their own" if job.clients.test is not None else "with parts of their own"
        why = f"the clients score the model, each {whose}"
    elif last.found is None:
        why = "the task predicts nothing row by row"
    else:
        _write(job, ready, labels, last.found, folder)
    return f"output.predictions: nothing is written, because {why}" if why and job.output.predictions else ""


def _write(job: Job, ready: Ready, labels: Sequence[str] | None, last: list[Predicted], folder: Path) -> None:
    """Write ``classes.json`` of a task with classes, and ``predictions.jsonl`` if the job asks for it."""
    target = TASK_KINDS[job.task.kind].target
    if target != "number":
        found = entity_classes(last) if target == "tag" else text_classes(last, list(labels or ()))
        write_bytes(folder / CLASSES, json.dumps(found, indent=1, ensure_ascii=False).encode())
    if job.output.predictions:
        order = scored_batches(ready.test, np.arange(len(ready.test)), job.train)
        predicted = dict(_predicted(order, last, labels, target))
        lines = [{"example": i, **where, **predicted[i]} for i, where in enumerate(_places(ready.test))]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_bytes(folder / PREDICTIONS, text.encode())


def text_classes(found: Sequence[Predicted], labels: list[str]) -> dict[str, Any]:
    """Labels, confusion matrix (a row per true class) and precision, recall, F1 and examples of each class."""
    truth = np.concatenate([batch.truth for batch in found])
    guess = np.concatenate([batch.guess for batch in found])
    matrix, made_of = confusion(truth, guess, len(labels)), counts(truth, guess, len(labels))
    each = {name: column.tolist() for name, column in class_scores(made_of)._asdict().items()}
    return {
        "labels": labels,
        "confusion": matrix.tolist(),
        "classes": [
            {"class": label, **{name: column[i] for name, column in each.items()}}
            for i, label in enumerate(labels)
        ],
    }


def entity_classes(found: Sequence[Predicted]) -> dict[str, Any]:
    """Precision, recall, F1 and number of each type of entity, as seqeval counts whole entities."""
    from seqeval.metrics import classification_report  # here: slow to load

    truth, guess = whole_texts(found)
    report = classification_report(truth, guess, output_dict=True, zero_division=0)
    return {
        "labels": [name for name in report if not name.endswith(" avg")],
        "confusion": None,
        "classes": [
            {
                "class": name,
                "precision": float(line["precision"]),
                "recall": float(line["recall"]),
                "f1": float(line["f1-score"]),
                "examples": int(line["support"]),
            }
            for name, line in report.items()
            if not name.endswith(" avg")
        ],
    }


def _places(examples: Examples) -> Iterator[dict[str, Any]]:
    """Of each example its ``row`` in the user's source; of several sources and chunks which of them it is."""
    rows = examples.tokens.rows
    numbers = rows if examples.numbers is None else examples.numbers
    sources = {int(example): name for name, index in examples.pools.items() for example in index}
    first, last = np.searchsorted(rows, rows, "left"), np.searchsorted(rows, rows, "right")
    for example, (number, begin, end) in enumerate(zip(numbers, first, last, strict=True)):
        yield {
            **({"source": sources[example]} if sources else {}),
            "row": int(number),
            **({"chunk": example - int(begin)} if end - begin > 1 else {}),
        }


def _predicted(
    order: Sequence[Index], found: Sequence[Predicted], labels: Sequence[str] | None, target: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of each test example its label and prediction; no text."""
    for index, batch in zip(order, found, strict=True):
        for example, truth, guess in zip(index, batch.truth, batch.guess, strict=True):
            if target == "class":
                assert labels is not None
                truth, guess = labels[int(truth)], labels[int(guess)]
            elif target == "number":
                truth, guess = float(truth), float(guess)
            yield int(example), {"label": truth, "prediction": guess}
