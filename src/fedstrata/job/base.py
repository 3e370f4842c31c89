"""What the job's tables have in common: unknown keys and wrong types are errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Share = Annotated[float, Field(gt=0, le=1)]


def _words(names: Any) -> Any:
    if not isinstance(names, list):
        return names
    return [str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in names]


Names = Annotated[list[str], BeforeValidator(_words)]
"""Names that may also be written as whole numbers, as class labels often are."""


class Table(BaseModel):
    """A table of the job file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _paths_as_text(cls, given: Any) -> Any:
        """What Python gives as a path is its text, as in a file."""
        if not isinstance(given, Mapping):
            return given
        return {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in given.items()}
