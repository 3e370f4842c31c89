"""``[wire]``: how tensors are encoded between client and server."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fedstrata.job.base import Table

Form = tuple[int, float, bool]
"""How changes travel in one direction: bits, density, rotation."""

DELTA = ("bits", "density", "rotation", "up_bits", "down_bits", "up_density", "down_density")
"""Keys of ``codec = "delta"``."""


def _packable(bits: int) -> int:
    if bits not in (8, 4, 2, 1):
        raise ValueError(f"must be 8, 4, 2 or 1, found {bits}")
    return bits


Bits = Annotated[int, AfterValidator(_packable)]
Density = Annotated[float, Field(ge=0.001, le=1)]


class Wire(Table):
    """``[wire]``: how tensors are encoded between client and server."""

    dtype: str = "fp32"
    """Of whole states; ``int8`` has a scale per row and error feedback, and clients send changes in it."""
    codec: Literal["none", "delta"] = "none"
    """``delta``: parts travel as changes against what the receiver holds, with error feedback, both ways."""
    bits: Bits = 8
    """Of delta: bits of an entry."""
    density: Density = 1.0
    """Of delta: share of a part's entries that a message holds."""
    rotation: bool = False
    """Of delta: a random rotation makes all entries alike before they are quantized."""
    up_bits: Bits | None = None
    """On the way to the server; ``bits`` when absent."""
    down_bits: Bits | None = None
    up_density: Density | None = None
    """On the way to the server; ``density`` when absent."""
    down_density: Density | None = None
    activations: Literal["fp32", "fp16", "bf16", "int8", "int4"] | None = None
    """Of split learning: how hidden states of batches travel, and their gradients; ``dtype`` when absent."""
    activations_density: Density = 1.0
    """Share of the channels of each token that a message holds, the largest."""
    gradients: Literal["fp32", "fp16", "bf16", "int8", "int4"] | None = None
    """How gradients travel; as ``activations`` when absent."""
    gradients_density: Density | None = None
    activations_changed: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Send only tokens that tell something new: states that moved by more than this share of their length."""

    part_period: Annotated[int, Field(ge=1, le=1000)] = 1
    """Every part is sent in every so many rounds, in turns; in between each client goes on with its own value."""

    @model_validator(mode="after")
    def _codec_fits(self) -> Self:
        if self.codec == "delta" and self.dtype == "int8":
            raise ValueError(
                "dtype: is 'int8', but with codec = 'delta' it is the type of whole states alone; "
                "expected one of: fp32, fp16, bf16"
            )
        if self.codec == "none":
            for key in DELTA:
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key}: goes with codec = 'delta' and only with it")
        return self

    @property
    def forms(self) -> tuple[Form, Form] | None:
        """How changes travel up and down; None where whole states travel."""
        if self.codec == "none":
            return None
        up = (self.up_bits or self.bits, self.up_density or self.density, self.rotation)
        return up, (self.down_bits or self.bits, self.down_density or self.density, self.rotation)

    @property
    def stream(self) -> tuple[tuple[str, float], tuple[str, float], float | None]:
        """Type and density of hidden states of batches, those of their gradients, and ``activations_changed``."""
        states = self.activations or self.dtype
        gradients = self.gradients or states, self.gradients_density or self.activations_density
        return (states, self.activations_density), gradients, self.activations_changed
