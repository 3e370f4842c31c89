"""Messages without content: their tensors are on the meta device, their bytes are known."""

from __future__ import annotations

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.plan.sharing import EVERYTHING, Sharing
from fedstrata.wire.codec import Codec, Shapes, SizedTensors, Spec, Wire, spec_bytes


class DryMessage(SizedTensors):
    """A message without content, and the tensors that it stands for."""

    def __init__(self, spec: Spec, shapes: Shapes) -> None:
        content = empty(spec)
        super().__init__(content, content.size)
        self.shapes = shapes  # kept alive: the wire knows them by their address
        self.decoded = empty({name: (torch.float32, shape) for name, shape in shapes.items()})


class DryWire(Wire):
    """A codec in a forecast: it encodes by its specification alone, once for the same shapes."""

    def __init__(self, codec: Codec, sharing: Sharing = EVERYTHING) -> None:
        super().__init__(codec, sharing)
        self._messages: dict[tuple[int, bool], DryMessage] = {}
        self._shapes: dict[tuple[tuple[str, tuple[int, ...]], ...], Shapes] = {}

    def message(self, shapes: Shapes, change: bool = False) -> DryMessage:
        """A message of tensors of these shapes."""
        key = (id(shapes), change)
        if key not in self._messages:
            self._messages[key] = DryMessage(self.codec.wire_spec(self.sharing.travelling(shapes), change), shapes)
        return self._messages[key]

    def encode(
        self, tensors: Tensors, reference: Tensors | None = None, residual: Tensors | None = None
    ) -> tuple[Tensors, Tensors]:
        """A message of these tensors' shapes, with nothing left out."""
        key = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        shapes = self._shapes.setdefault(key, dict(key))
        return self.message(shapes), {}

    def step(self, tensors: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
        """A change of the size that its specification says; what clients hold has the shapes that it had."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return empty(self.codec.step_spec(self.sharing.travelling(shapes))), held  # type: ignore[attr-defined]

    def decode(self, message: Tensors, reference: Tensors | None = None, held: Tensors | None = None) -> Tensors:
        """Tensors of the shapes that were encoded."""
        assert isinstance(message, DryMessage)
        return message.decoded

    def check(self, message: Tensors, shapes: Shapes, change: bool = False) -> None:
        """A message without content is right by construction."""


def empty(spec: Spec) -> SizedTensors:
    """A message of this specification, without content."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in spec.items()}
    return SizedTensors(tensors, spec_bytes(spec))
