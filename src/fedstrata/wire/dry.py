"""Messages without content: their tensors are on the meta device, their bytes are known."""

from __future__ import annotations

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import Codec, Shapes, SizedTensors, Spec, Wire, spec_bytes


class DryWire(Wire):
    """A codec in a forecast: it encodes by its specification alone, once for the same shapes."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._messages: dict[tuple[int, bool], tuple[Shapes, SizedTensors]] = {}
        self._shapes: dict[tuple[tuple[str, tuple[int, ...]], ...], Shapes] = {}

    def message(self, shapes: Shapes, change: bool = False) -> SizedTensors:
        """A message of tensors of these shapes."""
        key = (id(shapes), change)
        if key not in self._messages:
            self._messages[key] = shapes, empty(self.codec.wire_spec(shapes, change))
        return self._messages[key][1]

    def encode(
        self, tensors: Tensors, reference: Tensors | None = None, residual: Tensors | None = None
    ) -> tuple[Tensors, Tensors]:
        """A message of these tensors' shapes, with nothing left out."""
        key = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        shapes = self._shapes.setdefault(key, dict(key))
        return self.message(shapes), {}

    def decode(self, message: Tensors, reference: Tensors | None = None) -> Tensors:
        """The message itself, for its names."""
        return message

    def check(self, message: Tensors, shapes: Shapes, change: bool = False) -> None:
        """A message without content is right by construction."""


def empty(spec: Spec) -> SizedTensors:
    """A message of this specification, without content."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in spec.items()}
    return SizedTensors(tensors, spec_bytes(spec))
