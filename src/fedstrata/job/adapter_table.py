"""``[adapter]``: small matrices beside frozen ones, which are trained and sent in their place."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedstrata.job.base import Table

Rank = Annotated[int, Field(ge=1, le=4096)]


class Adapter(Table):
    """``[adapter]``: what is trained of a layer in place of the layer."""

    kind: Literal["none", "lora"] = "none"
    """``lora``: W + alpha / rank * B A; W is frozen, A ``[rank, in]`` and B ``[out, rank]`` are trained."""
    rank: Rank | dict[str, Rank] = 8
    """One number, or by client name and ``default``."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """Ends of the names of the modules that get one; the attention's query and value when absent."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of what goes into A."""
    init: Literal["gaussian", "svd"] = "gaussian"
    """A drawn and B zero, or both from the largest singular values of W, which W then lacks."""
    merge: Literal["alternate", "freeze_a", "exact", "plain"] = "alternate"
    """How the clients' B A become one."""
    merged_model: bool = True
    """Save the plain model too, with the products added to its matrices; a later stage starts from it."""

    @model_validator(mode="after")
    def _lora_fits(self) -> Self:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.kind == "none" and changed:
            raise ValueError(f"{changed[0]}: goes with kind = 'lora' and only with it")
        if isinstance(self.rank, dict) and not self.rank:
            raise ValueError("rank: names no client; expected a number, or ranks by client name and default")
        if self.targets and not all(self.targets):
            raise ValueError("targets: holds an empty name; expected ends of names of modules, such as 'query'")
        return self
