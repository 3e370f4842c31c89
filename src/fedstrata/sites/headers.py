"""Message headers: pydantic models, made from dataclasses, that check what came over the network.

Every integer of a dataclass is from 0 to ``MOST`` and every string has 1 to 200 characters, unless ``BOUNDS`` says
otherwise. All fields are required, unknown ones are errors. Weights travel beside the header, not in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, create_model

from fedstrata.plan.kinds import Phase
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.schedule import ScheduleSpan

MOST = 10**12
"""Largest integer of a header, where nothing else is said."""
MOST_EXAMPLES = 10**9
"""Most examples of a client."""
MOST_WORK = 10**24
"""Most FLOPs of a round, and pairs of positions: a thousand machines make fewer in a year."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Work = Annotated[int, Field(ge=0, le=MOST_WORK)]
Examples = Annotated[int, Field(ge=0, le=MOST_EXAMPLES)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Share = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]

BOUNDS: Mapping[tuple[type, str], Any] = {
    (Request, "round"): Annotated[int, Field(ge=-1, le=MOST)],
    (Request, "phase"): Phase,
    (Request, "span"): tuple[Share, Share],
    (Reply, "examples"): Annotated[int, Field(ge=1, le=MOST_EXAMPLES)],
    (Reply, "flops"): Work,
    (Reply, "seconds"): Seconds,
    (Reply, "scores"): Annotated[
        dict[Name, Annotated[dict[Name, float], Field(max_length=50)]], Field(max_length=1)
    ],
    (Positions, "pairs"): Work,
    (ScheduleSpan, "steps"): Positive,
    (ScheduleSpan, "epoch"): Positive,
    (ScheduleSpan, "begin"): Share,
    (ScheduleSpan, "end"): Share,
}
"""(dataclass, field) -> its type in the header, where the rule above is not enough."""
WEIGHTS = dict[str, dict[str, torch.Tensor]]
"""Type of the fields that hold tensors."""
BYTES = dict[str, bytes]
"""Type of the fields that hold other binary content, which travels beside the header too."""


class Header(BaseModel):
    """A header: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_dataclass_of: dict[type[Header], type] = {}


@functools.cache
def header_model(kind: type) -> type[Header]:
    """The header model of a dataclass; a dataclass in a field becomes a header of its own."""
    hints = get_type_hints(kind, localns={"torch": torch})
    fields: dict[str, Any] = {
        field.name: (BOUNDS.get((kind, field.name)) or _bounded(hints[field.name]), ...)
        for field in dataclasses.fields(kind)
        if hints[field.name] not in (WEIGHTS, BYTES)
    }
    model = create_model(f"{kind.__name__}Header", __base__=Header, **fields)
    _dataclass_of[model] = kind
    return model


def to_header(value: Any) -> Header:
    """The header of a dataclass instance, checked."""
    kind: type = type(value)
    return header_model(kind).model_validate(value, from_attributes=True)


def from_header(header: Header, **weights: Any) -> Any:
    """The dataclass instance that a header of :func:`header_model` stands for, with its fields of weights."""
    fields = {name: from_header(value) if type(value) in _dataclass_of else value for name, value in header}
    return _dataclass_of[type(header)](**fields, **weights)


def _bounded(hint: Any) -> Any:
    """A field's type with the bounds of the rule in it."""
    if hint in (int, str):
        return Count if hint is int else Name
    if dataclasses.is_dataclass(hint):
        return header_model(hint)  # type: ignore[arg-type]
    if get_args(hint):
        origin = Union if get_origin(hint) is UnionType else get_origin(hint)
        return origin[tuple(map(_bounded, get_args(hint)))]
    return hint
