"""The keys of ``site.toml`` about noise."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Epsilon = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delta = Annotated[float, Field(gt=0, le=0.1)]


class Require(BaseModel):
    """``[require]``: what a job must offer for the site to take part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sum_only: bool = False
    """The server sees sums alone."""
    honest: Annotated[int, Field(ge=1, le=256)] = 1
    """Of sums: most clients on whose noise it relies, its own included, where the job says ``honest``."""
    level: Literal["example", "client"] | None = None
    """Noise at this level."""
    epsilon: Epsilon | None = None
    """Most that a run may spend on this site, by its own count, as if asked in every round."""
    delta: Delta = 1e-5
    """Of ``epsilon``, whatever the job's is."""
