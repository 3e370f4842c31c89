"""The kinds of values in a run's records that a report draws or adds up; what else they hold is free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from fedstrata.errors import UserError
from fedstrata.job.sentences import TYPES, shown
from fedstrata.plan.streams import SERVER
from fedstrata.reports.privacy import privacy_lines

Score = dict[str, float]
DONE = ("examples", "loss", "flops", "seconds", "layers", "trained", "sent")
"""What every line of a client has."""


class ClientResult(BaseModel):
    """A client in ``result.json`` or ``partition.json``."""

    rows: int | None = 0
    examples: int
    score: Score | None = None
    labels: dict[str, int] | None = None


class BytesSent(BaseModel):
    """``bytes`` of ``result.json``."""

    model_config = ConfigDict(extra="forbid")

    up: int
    down: int
    setup: int


class Baseline(BaseModel):
    """``baseline`` of ``result.json``."""

    what: str
    score: Score


class Missing(BaseModel):
    """A line of ``missing.jsonl``."""

    round: int
    client: str
    reason: str


class Lost(BaseModel):
    """A line of ``lost.jsonl``."""

    round: int
    client: str
    what: list[str]


class Outlier(BaseModel):
    """A line of ``outliers.jsonl``."""

    round: int
    client: str
    times: float


class ResultRecord(BaseModel):
    """``result.json``."""

    status: str = ""
    message: str | None = None
    stage: str = ""
    method: str = ""
    task: str = ""
    headline: str = ""
    score: Score | None = None
    baseline: Baseline | None = None
    data: dict[str, Any] | None = None
    rounds: int = 0
    bytes: BytesSent = BytesSent(up=0, down=0, setup=0)
    flops: int = 0
    seconds: float = 0.0
    privacy: dict[str, Any] | None = None
    clients: dict[str, ClientResult] = {}
    stages: list[str] = []
    missing: list[Missing] = []
    lost: list[Lost] = []
    outliers: list[Outlier] = []

    @field_validator("privacy")
    @classmethod
    def _told(cls, privacy: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a page says of it can be said."""
        try:
            privacy_lines(privacy)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError("privacy is no record of a run's noise") from None
        return privacy

    @field_validator("stages")
    @classmethod
    def _inside(cls, stages: list[str]) -> list[str]:
        """Their folders are read: a name with a path would lead out of the run's."""
        for name in stages:
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"{shown(name)} is no name of a stage; expected letters, digits, - and _")
        return stages


class PartitionRecord(BaseModel):
    """``partition.json``."""

    clients: dict[str, ClientResult] = {}
    test: int = 0
    left_out: int = 0


class ClassRecord(BaseModel):
    """A class in ``classes.json``."""

    name: str = Field(alias="class")
    precision: float | None
    recall: float | None
    f1: float | None
    examples: int


class ClassesRecord(BaseModel):
    """``classes.json``."""

    labels: list[str]
    confusion: list[list[int]] | None
    classes: list[ClassRecord]

    @model_validator(mode="after")
    def _square(self) -> Self:
        sizes = {len(self.confusion), *map(len, self.confusion)} if self.confusion else {len(self.labels)}
        if sizes != {len(self.labels)}:
            raise ValueError("confusion must have a row and a column for each of labels")
        return self


class ModelPart(BaseModel):
    """An entry of ``parts.json``."""

    name: str
    kind: str
    depth: int | None


class RoundRecord(BaseModel):
    """A line of ``rounds.jsonl``: what a client did, or a score."""

    round: int
    client: str
    examples: int = 0
    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    flops: int = 0
    server_flops: int = 0
    seconds: float = 0.0
    staleness: int = 0
    layers: list[int] = []
    trained: list[str] = []
    sent: list[str] = []
    server: list[str] = []
    score: Score | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        wanted = ("score",) if self.client == SERVER else DONE
        if missing := next((key for key in wanted if key not in self.model_fields_set), None):
            raise ValueError(f"{missing} is missing")
        return self


class TransferRecord(BaseModel):
    """A line of ``ledger.jsonl``."""

    round: int
    client: str
    phase: str
    direction: str
    part: str
    bytes: int


RESULT = TypeAdapter(ResultRecord)
PARTITION = TypeAdapter(PartitionRecord)
CLASSES = TypeAdapter(ClassesRecord)
PARTS = TypeAdapter(list[ModelPart])
ROUNDS = TypeAdapter(list[RoundRecord])
LEDGER = TypeAdapter(list[TransferRecord])


def check_whole(folder: Path, result: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Refuse records that hold less than the result that was summed up from them.

    Raises:
        UserError: names the file.
    """
    last = recorded["rounds"]
    if last < result.get("rounds", 0):
        raise UserError(
            f"{folder / 'rounds.jsonl'}: ends after round {last} of a run that finished {result['rounds']}; it "
            "was cut since then"
        )
    for way, size in result.get("bytes", {}).items():
        if (left := recorded["bytes"].get(way, 0)) < size:
            raise UserError(
                f"{folder / 'ledger.jsonl'}: holds {left:,} bytes ({way}) of a run that sent {size:,}; it was cut "
                "since then"
            )


def check_record(path: Path, content: Any, kind: TypeAdapter[Any]) -> None:
    """Check what a file holds.

    Args:
        path: the file, for the error.
        content: its object, or the objects of its lines or its list.
        kind: what it must be.

    Raises:
        UserError: it is something else; names the line, the key and what was found there.
    """
    if kind is LEDGER and _transfers(content):
        return
    try:
        kind.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        number, *keys = first["loc"] if isinstance(content, list) else ("", *first["loc"])
        noun = "line" if path.suffix == ".jsonl" else "entry"
        where = f"{path}, {noun} {int(number) + 1}" if isinstance(content, list) else str(path)
        if first["type"] == "value_error":  # a check of our own names the key itself
            raise UserError(f"{where}: is no record of a run: {first['ctx']['error']}") from None
        place = " of ".join(map(str, reversed(keys))) or "it"
        expected = f"must be {TYPES.get(first['type'], 'of another kind')}, found {shown(first['input'])}"
        wanted = "is missing" if first["type"] == "missing" else expected
        raise UserError(f"{where}: is no record of a run: {place} {wanted}") from None


def _transfers(lines: list[Any]) -> bool:
    """Whether all lines are transfers; by columns, as a ledger has a line for every part that anybody sent."""
    columns = TransferRecord.model_fields.items()
    with suppress(KeyError, TypeError):
        return all(set(map(type, map(itemgetter(key), lines))) <= {field.annotation} for key, field in columns)
    return False
