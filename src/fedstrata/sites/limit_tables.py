"""The tables ``[limits]`` of a server and of a site, and a site's ``[approve]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedstrata.job.base import Positive
from fedstrata.sites import checks
from fedstrata.sites.noise_tables import Delta, Epsilon

Bytes = Annotated[int, Field(ge=1, le=10**18)]
Name = Annotated[str, AfterValidator(checks.site_name)]


class Table(BaseModel):
    """A table of a settings file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ServerLimits(Table):
    """``[limits]`` of a server: how much a site can do."""

    max_weight: Positive | dict[Name, Positive] | None = None
    """Most examples for which a site counts in a mean, or site -> that number; absent: for all that it says."""


class Limits(Table):
    """``[limits]``: bounds beyond which the site refuses."""

    min_examples: Positive = 8
    """Fewest distinct rows of its own that go into a message."""
    max_rounds: Positive = 10_000
    """Most rounds of a run."""
    max_runs: Positive | None = None
    """Most runs that the site ever takes part in, by its release log; every stage of a job is one."""
    bytes_per_round: Bytes | None = None
    """Most bytes that may leave in a round."""
    bytes_per_run: Bytes | None = None
    bytes_per_day: Bytes | None = None
    """Most bytes that may leave in 24 hours, whatever the run."""
    seconds_per_run: Positive | None = None
    """Most seconds of work in a run."""
    disk_per_run: Bytes | None = None
    """Most bytes that a run may take on the site's disk."""
    epsilon: Epsilon | None = None
    """Most that all runs together may spend on the site; runs without noise are then refused."""
    delta: Delta = 1e-5
    """Of ``epsilon``."""


class Approve(Table):
    """``[approve]``: in which jobs the site takes part."""

    runs: Literal["ask", "listed", "any"] = "ask"
    """Its owner is asked on the terminal; those listed in ``jobs`` alone; or all that the other tables permit."""
    jobs: list[Annotated[str, AfterValidator(checks.job_digest)]] = Field(default_factory=list)
    """Digests of jobs, as the server's run and the site show them."""
