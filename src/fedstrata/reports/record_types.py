"""The kinds of values in a run's records that a report draws or adds up; what else they hold is free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedstrata.errors import UserError
from fedstrata.job.sentences import TYPES, shown

Score = dict[str, float]


class ClientResult(BaseModel):
    """A client in ``result.json`` or ``partition.json``."""

    rows: int = 0
    examples: int = 0
    score: Score | None = None
    labels: dict[str, int] | None = None


class BytesSent(BaseModel):
    """``bytes`` of ``result.json``."""

    up: int = 0
    down: int = 0
    setup: int = 0


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
    bytes: BytesSent = BytesSent()
    flops: int = 0
    seconds: float = 0.0
    privacy: dict[str, Any] | None = None
    clients: dict[str, ClientResult] = {}
    stages: list[str] = []
    missing: list[Missing] = []
    lost: list[Lost] = []
    outliers: list[Outlier] = []


class PartitionRecord(BaseModel):
    """``partition.json``."""

    clients: dict[str, ClientResult] = {}
    test: int = 0
    left_out: int = 0


class ClassRecord(BaseModel):
    """A class in ``classes.json``."""

    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    examples: int = 0


class ClassesRecord(BaseModel):
    """``classes.json``."""

    labels: list[str] = []
    confusion: list[list[int]] | None = None
    classes: list[ClassRecord] = []


class RoundRecord(BaseModel):
    """A line of ``rounds.jsonl``."""

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
ROUNDS = TypeAdapter(list[RoundRecord])
LEDGER = TypeAdapter(list[TransferRecord])


def check_record(path: Path, content: Any, kind: TypeAdapter[Any]) -> None:
    """Check what a file holds.

    Args:
        path: the file, for the error.
        content: its object, or the objects of its lines.
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
        where = f"{path}, line {int(number) + 1}" if isinstance(content, list) else str(path)
        place = " of ".join(map(str, reversed(keys))) or "it"
        expected = f"must be {TYPES.get(first['type'], 'of another kind')}, found {shown(first['input'])}"
        wanted = "is missing" if first["type"] == "missing" else expected
        raise UserError(f"{where}: is no record of a run: {place} {wanted}") from None


def _transfers(lines: list[Any]) -> bool:
    """Whether all lines are transfers; by columns, as a ledger has a line for every part that anybody sent."""
    columns = TransferRecord.model_fields.items()
    with suppress(KeyError, TypeError):
        return all({type(line[key]) for line in lines} <= {field.annotation} for key, field in columns)
    return False
