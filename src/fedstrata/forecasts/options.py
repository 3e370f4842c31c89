"""What is asked of a forecast beside the job, checked before anything heavy is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from fedstrata.cost import papers
from fedstrata.errors import UserError, did_you_mean
from fedstrata.events import Event
from fedstrata.runs.components import Components

MOST_EXAMPLES = 20_000_000
"""Examples of all clients together; each takes 16 bytes of memory."""
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class ForecastOptions:
    """What is asked of a forecast beside the job; see :func:`fedstrata.forecast`.

    Raises:
        UserError: a number is out of its range, or there are no such units.
    """

    methods: Sequence[str] = ()
    count: int | None = None
    tokens: int | None = None
    client: str | None = None
    bandwidth: float | None = None
    gflops: float | None = None
    units: str | None = None
    components: Components = field(default_factory=Components)
    tell: Callable[[Event], None] = lambda event: None

    def __post_init__(self) -> None:
        for name, count, most in (("examples", self.count, MOST_EXAMPLES), ("tokens", self.tokens, MOST_TOKENS)):
            whole = isinstance(count, Integral) and not isinstance(count, bool)
            if count is not None and not (whole and 1 <= count <= most):
                shown = f"{count:,}" if whole else repr(count)
                raise UserError(f"--{name}: expected a number from 1 to {most:,}, found {shown}")
        for name, speed in (("bandwidth", self.bandwidth), ("gflops", self.gflops)):
            real = isinstance(speed, Real) and not isinstance(speed, bool)
            if speed is not None and not (real and math.isfinite(speed) and speed >= 1e-9):
                raise UserError(f"--{name}: expected a number above 0, found {speed!r}")
        if self.units is not None and self.units not in papers.UNITS:
            raise UserError(f"--units: no paper {self.units!r}; {did_you_mean(self.units, papers.UNITS)}")
