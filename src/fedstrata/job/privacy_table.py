"""``[privacy]``: what bounds what can be learned from a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedstrata.job.base import Positive, Table
from fedstrata.job.paths import Place

Omission = Literal["decoder_bias", "position_rows", "embeddings", "unlisted_rows"]
"""What can be left out of messages: rows are those of embedding tables, ``unlisted_rows`` those of the tokens that
no public vocabulary lists."""

NOISE = ("clip", "epsilon", "noise", "delta", "accountant", "participations", "single_message", "honest")
"""Keys that go with noise alone."""


class Privacy(Table):
    """``[privacy]``: noise and what it promises, sums instead of single messages, and what is left out."""

    level: Literal["none", "example", "client"] = "none"
    """Whose presence the noise hides: nobody's, any one training example's, or any one client's whole data."""
    clip: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Longest norm (L2) of an example's gradient, or of the change in a client's message; longer ones are cut. Far
    below 1e-6 the squares of which norms are made are 0 in fp32, and longer ones would pass."""
    epsilon: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """What the whole stage may spend, for ``delta``; the noise is calibrated for it."""
    noise: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """In place of ``epsilon``: standard deviation of the noise, in units of ``clip``."""
    delta: Annotated[float, Field(gt=0, le=0.1)] = 1e-5
    accountant: Literal["pld", "rdp"] = "pld"
    participations: Positive | None = None
    """Most rounds in which a client takes part: ``epsilon`` is calibrated for them. Absent: as the sampling of
    clients has it; between sites every round, since the server picks whom it asks."""
    single_message: bool = False
    """Of ``client`` without ``sum_only``: it is known that the server sees every single message, and that the
    promise is about these."""
    honest: Annotated[int, Field(ge=1, le=256)] | None = None
    """Of ``client`` with ``sum_only``: so many of the clients in every sum that is opened add their noise,
    whatever the others do. Each adds a share; no sum of fewer is opened. Absent: 1, each hides itself."""
    sum_only: bool = False
    """The server sees sums of the clients' messages, and no single one."""
    omit: list[Omission] = Field(default_factory=list)
    """What clients do not send."""
    public_vocabulary: Place | None = None
    """Of ``unlisted_rows``: a file with a token of the public vocabulary on each line."""

    @model_validator(mode="after")
    def _noise_is_known(self) -> Self:
        if self.level == "none":
            if told := [key for key in NOISE if getattr(self, key) != self._default(key)]:
                raise ValueError(f"{told[0]}: goes with level = 'example' or 'client', not with 'none'")
        elif (self.epsilon is None) == (self.noise is None):
            found = "neither" if self.noise is None else "both"
            raise ValueError(
                f"epsilon: found {found} of epsilon and noise; level = {self.level!r} needs one of them"
            )
        if self.single_message and self.level != "client":
            raise ValueError("single_message: goes with level = 'client' and only with it")
        if self.single_message and self.sum_only:
            raise ValueError(
                "single_message: with sum_only = true the server sees no single message; leave it out"
            )
        if self.honest is not None and not (self.level == "client" and self.sum_only):
            raise ValueError(
                "honest: goes with level = 'client' and sum_only = true, where clients share the noise"
            )
        return self

    @model_validator(mode="after")
    def _omissions_fit(self) -> Self:
        if twice := next((name for name in self.omit if self.omit.count(name) > 1), None):
            raise ValueError(f"omit: names {twice!r} more than once")
        if ("unlisted_rows" in self.omit) != (self.public_vocabulary is not None):
            raise ValueError("public_vocabulary: goes with 'unlisted_rows' in omit, which needs it")
        if {"unlisted_rows", "embeddings"} <= set(self.omit):
            raise ValueError("omit: 'embeddings' leaves out every row, so 'unlisted_rows' goes without it")
        return self

    @property
    def shared_noise(self) -> bool:
        """The noise is that of a sum, in whole numbers."""
        return self.level == "client" and self.sum_only

    @property
    def counted_by(self) -> Literal["pld", "rdp"]:
        """The accountant whose bound holds: of sums of discrete numbers Rényi's is known."""
        return "rdp" if self.shared_noise else self.accountant

    def _default(self, key: str) -> Any:
        return type(self).model_fields[key].default
