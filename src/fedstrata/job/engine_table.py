"""``[engine]``: where the clients run."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedstrata.job.base import Positive, Share, Table
from fedstrata.job.paths import MaybePlace, Place
from fedstrata.job.sentences import shown

ADDRESS = re.compile(r"auto|(ray://)?[^\s:/@]+:[0-9]{1,5}|(ray://)?\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")
"""Where a Ray cluster is."""
MOST = 4096
"""Largest number of workers, and of threads of one."""


def _number(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 1 <= value <= MOST) and not (isinstance(value, str) and value == "auto"):
        raise ValueError(f"must be 'auto' or a whole number from 1 to {MOST}, found {shown(value)}")
    return value


Number = Annotated[Literal["auto"] | int, BeforeValidator(_number)]


class Engine(Table):
    """``[engine]``: where the clients run."""

    name: Literal["auto", "inprocess", "pool", "flower"] = "auto"
    """``auto`` is ``pool`` where clients can train side by side and it pays, else ``inprocess``."""
    workers: Number = "auto"
    """Of pool: processes that run clients side by side."""
    threads: Number = "auto"
    """CPU threads with which one client trains; a run's last bits depend on it."""
    address: str | None = None
    """Of pool: the Ray cluster whose actors are the workers, "auto", "HOST:PORT" or "ray://HOST:PORT"; else they
    are processes on this machine."""
    federation: MaybePlace | None = None
    """Of flower: the folder that ``fedstrata federation init`` made, or its server.toml."""
    deadline: Annotated[float, Field(gt=0, le=1e9)] = 3600.0
    """Of flower: seconds to wait for a site to connect, and for its reply to a request."""
    quorum: Share = 0.5
    """Of flower: share of the sampled sites that must reply; with fewer the run stops."""
    insecure: bool = False
    """Of flower: without TLS and keys, on this machine alone."""
    buffer: Positive | None = None
    """Asynchronous rounds: a round ends with so many answers, and those that come later are merged later; absent:
    it waits for all."""
    arrivals: Annotated[Place, AfterValidator(os.path.expanduser)] | None = None
    """Of asynchronous rounds in one process: the ``arrivals.jsonl`` of a run whose answers came in the order to be
    repeated; absent: the order is drawn."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if self.name == "flower" and self.federation is None:
            raise ValueError("federation: is missing; name = 'flower' needs the federation's folder")
        if self.address is not None and self.name != "pool":
            raise ValueError("address: goes with name = 'pool', whose workers are then on a Ray cluster")
        if self.address is not None and not ADDRESS.fullmatch(self.address):
            raise ValueError(
                f"address: must be 'auto', 'HOST:PORT' or 'ray://HOST:PORT', found {shown(self.address)}"
            )
        for key in ("federation", "insecure"):
            if self.name != "flower" and getattr(self, key):
                raise ValueError(f"{key}: is for runs between sites, with name = 'flower' alone")
        if self.name == "flower" and self.threads != "auto":
            raise ValueError("threads: between sites each site sets its own, [device] threads of its site.toml")
        if self.arrivals is not None and self.buffer is None:
            raise ValueError("arrivals: goes with asynchronous rounds; expected engine.buffer with it")
        if self.name == "flower" and self.arrivals is not None:
            raise ValueError("arrivals: is for one process; between sites answers arrive when they do")
        if self.name in ("inprocess", "flower") and self.workers != "auto":
            raise ValueError("workers: goes with name = 'pool' or 'auto'")
        return self
