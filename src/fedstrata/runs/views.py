"""A result as a notebook shows it: data frames, a plot, HTML, the model and a pipeline; made from its files."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstrata.errors import UserError
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.streams import SERVER
from fedstrata.reports.card import PIPELINES
from fedstrata.wire.files import read_lines

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from transformers import Pipeline, PreTrainedModel, PreTrainedTokenizerBase


class TrainedModel(NamedTuple):
    """A trained model and its tokenizer, as ``transformers`` loads them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def frame(records: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> pandas.DataFrame:
    """Records as a data frame, a row each; of none the ``columns`` that there would be."""
    import pandas  # here: slow to load

    return pandas.DataFrame.from_records(list(records), columns=None if records else columns)


def history(folder: Path) -> list[dict[str, Any]]:
    """The records of the rounds of one stage, scores as columns of their own (``score.accuracy``)."""
    lines = []
    for record in read_lines(folder / "rounds.jsonl"):
        flat = {key: value for key, value in record.items() if not isinstance(value, dict)}
        scores = record.get("score") or {}
        lines.append({**flat, **{f"score.{name}": value for name, value in scores.items()}})
    return lines


def load_model(folder: Path, task: str) -> TrainedModel:
    """The model in a folder as the class of its task, and its tokenizer.

    Raises:
        UserError: the folder's model cannot be loaded.
    """
    import transformers

    import fedstrata.models.heads  # noqa: F401  a model with one of them is known then, without the folder's code
    from fedstrata.models.configs import read_config

    kind = getattr(transformers, TASK_KINDS[task].model)
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: holds no model")
    read_config(str(folder))
    model = kind.from_pretrained(folder, trust_remote_code=False)
    return TrainedModel(model, transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


def pipeline(folder: Path, task: str, **options: Any) -> Pipeline:
    """A ``transformers`` pipeline over the model in a folder; entities of ``tag`` are joined.

    Raises:
        UserError: there is none for the task.
    """
    import transformers

    import fedstrata.models.heads  # noqa: F401  as in :func:`load_model`
    from fedstrata.models.configs import read_config

    name = PIPELINES.get(task)
    if name is None:
        raise UserError(f"pipeline: task {task!r} has none; model() gives the model and its tokenizer")
    if task == "tag":
        options = {"aggregation_strategy": "simple", **options}
    if name == "text-classification":
        options = {"truncation": True, **options}  # a longer text is cut, as in training; that of tags is anyway
    read_config(str(folder))
    options = {"trust_remote_code": False, **options}
    return transformers.pipeline(name, model=str(folder), tokenizer=str(folder), **options)


def plot(title: str, headline: str, records: Sequence[Mapping[str, Any]]) -> Figure:
    """The headline score, and the clients' mean training loss, round by round."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows by itself, whether pyplot is imported or not."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=100)
            return written.getvalue()

    figure = Picture(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    scored = [line for line in records if line["client"] == SERVER and f"score.{headline}" in line]
    left.plot([line["round"] + 1 for line in scored], [line[f"score.{headline}"] for line in scored], marker="o")
    left.set(xlabel="round", ylabel=headline, title=title)
    losses: dict[int, list[float]] = {}
    for line in records:
        if line["client"] != SERVER and line.get("loss") is not None:
            losses.setdefault(line["round"] + 1, []).append(line["loss"])
    right.plot(list(losses), [sum(values) / len(values) for values in losses.values()], marker="o")
    right.set(xlabel="round", ylabel="training loss, mean of the clients")
    return figure


def as_html(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"
