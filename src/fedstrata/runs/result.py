"""What a run came to: ``result.json``, always made from the records on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.errors import UserError, four_decimals, megabytes
from fedstrata.models.folders import FILES
from fedstrata.wire.files import clear, copy_folder, read_lines, replace_folder, write_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from fedstrata.runs.views import TrainedModel

KEYS = ("status", "score", "bytes", "flops", "seconds", "clients", "model", "shared", "scored")
"""What every ``result.json`` has."""


@dataclass(frozen=True)
class Result:
    """What a run came to; the same fields as its ``result.json``.

    Attributes:
        folder: the output folder.
        status: ``finished``, ``stopped`` or ``failed``.
        score: metric -> value, of the last stage.
        bytes: payload ``up`` and ``down`` over all rounds and clients; the start model apart, as ``setup``.
        flops: of all training steps, at the clients and at the server.
        seconds: clock time.
        model_folder: folder of the final model; None where each client has its own.
        shared: folder of the parts that all clients have in common where each has its own model; else None.
        adapter: folder of the final model's adapters, for peft; None without adapters, or where each client has
            its own, in ``clients/NAME/adapter``.
        scored: which folder or folders the score belongs to, as a phrase; None of a run that is not finished.
        clients: client -> its ``rows`` and ``examples``, and where it keeps parts its own ``score`` and the folder
            of its own ``model``, below ``folder``.
        baseline: ``what`` is always predicted, and its ``score``, metric -> value; None for a task without labels.
        data: what is known of the rows (:func:`fedstrata.data.facts.row_facts`), and what tokenization does to
            them (:func:`fedstrata.client.facts.token_facts`).
        target: of a job with ``output.target``: that ``score``, and the ``rounds`` and ``bytes`` of the last stage
            until it was first reached, None where it never was.
        privacy: what noise promises (:func:`fedstrata.runs.privacy.privacy_record`, of several stages
            :func:`fedstrata.runs.privacy.combined_privacy`); None without noise.
        stages: the stages' results, in order; empty for a job of one stage.
        task: the last stage's kind of task.
        headline: its headline metric.
    """

    folder: Path
    status: str
    score: dict[str, float]
    bytes: dict[str, int]
    flops: int
    seconds: float
    model_folder: Path | None
    shared: Path | None
    scored: str | None
    clients: dict[str, Any]
    target: dict[str, Any] | None = None
    baseline: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    stages: tuple[Result, ...] = field(default=())
    adapter: Path | None = None
    task: str = ""
    headline: str = ""
    privacy: dict[str, Any] | None = None
    place: Path = field(init=False, repr=False, compare=False)
    """``folder`` whatever the working directory is by now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", self.folder.absolute())

    @property
    def history(self) -> pandas.DataFrame:
        """A row for each client and each scored model of every round, stage by stage; scores as ``score.NAME``."""
        from fedstrata.runs import views

        if self.stages:
            lines = [
                {"stage": one.folder.name, **line} for one in self.stages for line in views.history(one._there())
            ]
            return views.frame(lines)
        return views.frame(views.history(self._there()))

    def pipeline(self, **options: Any) -> Any:
        """A ``transformers`` pipeline over the trained model: ``result.pipeline()("a text")``.

        Args:
            options: of ``transformers.pipeline``; entities are joined with ``aggregation_strategy="simple"``, and
                a text to be classified that is longer than the model reads is cut (``truncation=True``).

        Raises:
            UserError: there is no single model, or its task has no pipeline, or the folder is gone.
        """
        from fedstrata.runs import views

        return views.pipeline(self._one_model(), self.task, **options)

    def plot(self) -> Figure:
        """The last stage's score and training loss, round by round."""
        from fedstrata.runs import views

        last = self.stages[-1] if self.stages else self
        return views.plot(last.folder.name, last.headline, views.history(last._there()))

    def _repr_html_(self) -> str:
        from fedstrata.reports.tables import TERA, figure
        from fedstrata.runs import views

        score = ", ".join(f"{name} {four_decimals(value)}" for name, value in self.score.items())
        sent = ", ".join(f"{megabytes(self.bytes[way])} {way}" for way in ("up", "down"))
        return views.as_html(
            [
                ("run", str(self.folder)),
                ("status", self.status),
                ("score", score or "none"),
                ("sent, all clients", sent),
                ("compute", f"{figure(self.flops / TERA)} TFLOP"),
                ("time", f"{self.seconds:,.0f} s"),
                ("model", str(self.model_folder or self.scored or "none")),
            ]
        )

    def _one_model(self) -> Path:
        if self.model_folder is None:
            raise UserError(f"{self.folder}: there is no single model ({self.scored or self.status})")
        return self._there() / self.model_folder.relative_to(self.folder)

    def _there(self) -> Path:
        """``place``, which must be there still: without its records a run would seem to have done nothing."""
        if not (self.place / "result.json").exists():
            raise UserError(f"{self.folder}: its result.json is gone; a result is read from the run's own folder")
        return self.place

    @property
    def start(self) -> Path:
        """The folder that a later stage starts from."""
        found = self.model_folder or self.shared
        assert found is not None
        return found

    def model(self) -> TrainedModel:
        """The trained model and its tokenizer, loaded by ``transformers``: ``model, tokenizer = result.model()``.

        Raises:
            UserError: there is no single model.
        """
        from fedstrata.runs import views

        return views.load_model(self._one_model(), self.task)

    @property
    def ledger(self) -> pandas.DataFrame:
        """A row for each transfer of the run: round, client, phase, direction, part and bytes."""
        from fedstrata.cost.ledger import Entry
        from fedstrata.runs import views

        own = [field.name for field in fields(Entry)]
        return views.frame(self.transfers, ["stage", *own] if self.stages else own)

    @property
    def transfers(self) -> list[dict[str, Any]]:
        """The rows of :attr:`ledger` as :class:`fedstrata.cost.ledger.Entry` describes them, stage by stage."""
        if self.stages:
            return [{"stage": stage.folder.name, **line} for stage in self.stages for line in stage.transfers]
        return read_lines(self._there() / "ledger.jsonl")


def combine_stages(stages: Sequence[Result], folder: Path, otherwise: bool) -> Result:
    """The result of a job of several stages: the last one's score and model, the sums of all costs.

    Args:
        stages: their results.
        folder: the job's output folder.
        otherwise: as of :func:`fedstrata.runs.privacy.combined_privacy`.
    """
    from fedstrata.runs.privacy import combined_privacy  # needs torch

    last = _read(stages[-1].folder)
    kinds = ("up", "down", "setup")
    result = {
        **last,
        "stages": [stage.folder.name for stage in stages],
        "bytes": {kind: sum(stage.bytes[kind] for stage in stages) for kind in kinds},
        "flops": sum(stage.flops for stage in stages),
        "seconds": sum(stage.seconds for stage in stages),
        "privacy": combined_privacy([(stage.folder.name, stage.privacy) for stage in stages], otherwise),
    }
    for name in ("model", "shared", "clients", "adapter", "base"):
        if (stages[-1].folder / name).exists():
            partial = folder / f".{name}.part"
            shutil.rmtree(partial, ignore_errors=True)
            copy_folder(stages[-1].folder / name, partial)
            replace_folder(partial, folder / name, FILES)
        else:
            clear(folder / name, FILES)
    write_summary(folder, result)
    return read_result(folder)


def read_result(folder: Path) -> Result:
    """The result in an output folder."""
    data = _read(folder)
    return Result(
        folder=folder,
        **{name: data[name] for name in KEYS[:-3]},
        model_folder=data["model"] and folder / data["model"],
        shared=data["shared"] and folder / data["shared"],
        scored=data["scored"],
        adapter=folder / data["adapter"] if data.get("adapter") else None,
        target=data.get("target"),
        baseline=data.get("baseline"),
        data=data.get("data"),
        task=data.get("task", ""),
        headline=data.get("headline", ""),
        privacy=data.get("privacy"),
        stages=tuple(read_result(folder / "stages" / name) for name in data.get("stages", ())),
    )


def read_status(folder: Path) -> str | None:
    """The status in an output folder, None where there is no result yet, or none that can be read."""
    try:
        return str(json.loads((folder / "result.json").read_text(encoding="utf-8"))["status"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def stages_of(folder: Path) -> list[str]:
    """The names of the stages of a run that has ended; "" for the one of a job without ``[[stages]]``."""
    record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    found: list[str] = record.get("stages") or [record.get("stage", "")]
    return found


def _read(folder: Path) -> dict[str, Any]:
    """What ``result.json`` holds.

    Raises:
        UserError: it cannot be read, or is no run's result.
    """
    path = folder / "result.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or not data.keys() >= set(KEYS):
        raise UserError(f"{path}: is damaged; --resume makes it again from the run's records")
    return data


def write_summary(folder: Path, result: dict[str, Any]) -> None:
    """Write a ``result.json``."""
    write_bytes(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False).encode())
