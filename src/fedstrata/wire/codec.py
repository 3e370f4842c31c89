"""Codecs: parts as they travel and back, and what is checked before a received tensor is used.

A codec says for given shapes exactly what a message holds, before the run; what it cannot express it may leave to
the next message (error feedback). To add one: a class like those below and a line in :data:`CODECS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from fedstrata.errors import UserError, did_you_mean
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.sharing import EVERYTHING, Sharing
from fedstrata.wire.int8 import quantize_rows
from fedstrata.wire.partial import filled, travelling
from fedstrata.wire.pure import pure
from fedstrata.wire.states import DTYPES as DTYPES  # its users know them from here
from fedstrata.wire.states import SCALE as SCALE
from fedstrata.wire.states import Shapes as Shapes
from fedstrata.wire.states import Spec as Spec
from fedstrata.wire.states import WireError as WireError
from fedstrata.wire.states import check as check
from fedstrata.wire.states import dequantize as dequantize
from fedstrata.wire.states import quantize as quantize
from fedstrata.wire.states import wire_spec as wire_spec


class Codec(Protocol):
    """How parts travel.

    ``reference`` is the same part as the receiver holds it, fp32, where both ends know it: on the way up the
    weights that the client started from. A codec of whole states ignores it; one of changes needs it, and sends
    whole states where it is None.

    No method may change in place what it is given: a run goes on with those very tensors. :class:`Wire` refuses a
    change in place that torch has counted.

    Attributes:
        name: the codec's name in records.
        changes: on the way up its messages are changes against a reference.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def changes(self) -> bool:
        """See the class."""

    def wire_spec(self, shapes: Shapes, change: bool) -> Spec:
        """What a message of tensors of these shapes holds; with ``change`` there is a reference."""

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        """The tensors as they travel, and the residual to add to the next message.

        Args:
            tensors: what is to be sent, fp32.
            reference: see above.
            residual: what earlier messages left out of each; empty for a first message.
        """

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        """The tensors of a message that was checked against :meth:`wire_spec`, fp32."""


@runtime_checkable
class ChainedCodec(Protocol):
    """A codec whose changes travel on the way down as well; the methods are those of :class:`Wire`."""

    def step(self, tensors: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
        """See :meth:`Wire.step`."""

    def follow(self, message: Tensors, held: Tensors) -> Tensors:
        """See :meth:`Wire.follow`."""

    def check_step(self, message: Tensors, shapes: Shapes) -> None:
        """See :meth:`Wire.check_step`."""


@dataclass(frozen=True)
class StateCodec:
    """Whole states in a float of :data:`DTYPES`; nothing is left for the next message."""

    name: str
    changes: bool = False

    def wire_spec(self, shapes: Shapes, change: bool) -> Spec:
        """See :func:`wire_spec`."""
        return wire_spec(shapes, self.name)

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        """See :class:`Codec`; tensors that have the wire type already are not copied."""
        return quantize(tensors, self.name), {}

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        """See :class:`Codec`."""
        return dequantize(message)


@dataclass(frozen=True)
class Int8Codec:
    """``int8`` with error feedback: whole states down, changes against them up.

    The messages' sum differs from that of what was to be sent by the last residual alone, however coarse the
    steps (Seide et al. 2014; Karimireddy et al. 2019). On the way up a step is 1/127 of a row's largest change,
    not of its largest weight; what has not changed arrives as it was.
    """

    name: str = "int8"
    changes: bool = True

    def wire_spec(self, shapes: Shapes, change: bool) -> Spec:
        """See :func:`wire_spec`; changes have the same."""
        return wire_spec(shapes, "int8")

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        """See :class:`Codec`."""
        message, left = Tensors(), Tensors()
        for name, tensor in tensors.items():
            base, old = (reference or {}).get(name), residual.get(name)
            if tensor.ndim > 1:
                message[name], message[name + SCALE], left[name] = quantize_rows(tensor, base, old)
                continue
            whole = tensor if base is None else tensor - base.to(tensor.device)
            whole = whole if old is None else whole + old.to(tensor.device)
            message[name] = whole.to(torch.float16)
            left[name] = whole - message[name].float()
        return message, left

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        """See :class:`Codec`."""
        return dequantize(message, reference)


CODECS: Mapping[str, Callable[[], Codec]] = {
    "fp32": lambda: StateCodec("fp32"),
    "fp16": lambda: StateCodec("fp16"),
    "bf16": lambda: StateCodec("bf16"),
    "int8": Int8Codec,
}
"""``[wire] dtype`` -> its codec."""


def make_codec(name: str) -> Codec:
    """The codec of a name.

    Raises:
        UserError: there is none.
    """
    if name not in CODECS:
        raise UserError(f"[wire] dtype: {name!r} is invalid; {did_you_mean(name, CODECS)}")
    return CODECS[name]()


class SizedTensors(Tensors):
    """Tensors whose bytes are known, so that nobody counts them again."""

    def __init__(self, tensors: Tensors, size: int) -> None:
        super().__init__(tensors)
        self.size = size


def payload_bytes(tensors: Tensors) -> int:
    """Bytes of tensors as they travel, without headers."""
    if isinstance(tensors, SizedTensors):
        return tensors.size
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def spec_bytes(spec: Spec) -> int:
    """Bytes of a message that holds this."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in spec.values())


class Wire:
    """A codec as both ends use it: nothing is decoded that was not checked.

    Args:
        codec: how tensors travel.
        sharing: which of them, and which of their rows, do not.
    """

    def __init__(self, codec: Codec, sharing: Sharing = EVERYTHING) -> None:
        self.codec, self.sharing = codec, sharing

    @property
    def changes(self) -> bool:
        """Messages on the way up are changes against what the client received."""
        return self.codec.changes

    @property
    def lossless(self) -> bool:
        """What arrives is what was sent, to the bit."""
        return self.codec == StateCodec("fp32")  # a codec of one's own may have any name

    @property
    def chained(self) -> bool:
        """On the way down changes travel too, see :mod:`fedstrata.wire.chain`."""
        return isinstance(self.codec, ChainedCodec)

    def encode(
        self, tensors: Tensors, reference: Tensors | None = None, residual: Tensors | None = None
    ) -> tuple[Tensors, Tensors]:
        """See :meth:`Codec.encode`; of a part's tensors only what travels is encoded."""
        known = None if reference is None else travelling(reference, self.sharing)
        given = travelling(tensors, self.sharing)
        with self._as_given("encode", given, known):
            return self.codec.encode(given, known, residual or {})

    def step(self, tensors: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
        """The change from what clients hold to ``tensors`` as it travels, and what they then hold."""
        assert isinstance(self.codec, ChainedCodec)
        message, new = self.codec.step(travelling(tensors, self.sharing), travelling(held, self.sharing))
        return message, filled(new, held, self.sharing)

    def follow(self, message: Tensors, held: Tensors) -> Tensors:
        """What a client then holds that is sent such a change."""
        assert isinstance(self.codec, ChainedCodec)
        return filled(self.codec.follow(message, travelling(held, self.sharing)), held, self.sharing)

    def check_step(self, message: Tensors, shapes: Shapes) -> None:
        """Compare a received change with what it must hold; it raises what :meth:`check` raises."""
        assert isinstance(self.codec, ChainedCodec)
        self.codec.check_step(message, self.sharing.travelling(shapes))

    def decode(self, message: Tensors, reference: Tensors | None = None, held: Tensors | None = None) -> Tensors:
        """The tensors of a message of one's own, or of one that was checked before.

        Args:
            message: the message.
            reference: the part that it is a change against; None where it is whole.
            held: the part as it is here, from which comes what does not travel; of a change its reference.
        """
        known = None if reference is None else travelling(reference, self.sharing)
        with self._as_given("decode", message, known):
            found = self.codec.decode(message, known)
        return filled(found, held if reference is None else reference, self.sharing)

    @contextmanager
    def _as_given(self, method: str, *given: Tensors | None) -> Iterator[None]:
        """Refuse a codec that changes what it is given: the run would go on with that, and nobody would see it.

        Nor may it change itself, see :func:`fedstrata.wire.pure.pure`.
        """
        tensors = [tensor for one in given for tensor in (one or {}).values() if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]  # torch counts changes in place
        what = f"codec {self.codec.name!r}: {method}"
        with pure(self.codec, what, "what is to last in the residual that encode returns"):
            yield
        if versions != [tensor._version for tensor in tensors]:
            raise UserError(f"{what} changes in place what it is given; expected new tensors")

    def check(self, message: Tensors, shapes: Shapes, change: bool = False) -> None:
        """Compare a received message with what it must hold.

        Raises:
            WireError: names, shapes or types differ, a value is not finite, or the codec's own ``check_change``
                objects.
        """
        shapes = self.sharing.travelling(shapes)
        check(message, self.codec.wire_spec(shapes, change))
        if change and hasattr(self.codec, "check_change"):
            self.codec.check_change(message, shapes)

    def size(self, shapes: Shapes, change: bool = False) -> int:
        """Bytes of a message of tensors of these shapes."""
        return spec_bytes(self.codec.wire_spec(self.sharing.travelling(shapes), change))
