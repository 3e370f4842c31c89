"""The codec of changes: ``[wire] codec = "delta"``.

On the way up a client sends its change against what it received, and keeps what the message leaves out for the
next one. On the way down the server sends the change from what its clients hold to its own weights, so that what
one message leaves out is part of the next change; see :mod:`fedstrata.wire.chain`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.changes import ChangeForm, change_spec, check_change, decode_change, encode_change
from fedstrata.wire.codec import Codec, Shapes, Spec, StateCodec, check, make_codec

Form = tuple[int, float, bool]
"""Bits, density, rotation: a :class:`ChangeForm`."""


@dataclass(frozen=True)
class DeltaCodec:
    """Changes with error feedback; whole states where there is no reference.

    The sum of a sender's messages differs from what it had to send by the last residual alone (Seide et al. 2014;
    Karimireddy et al. 2019).

    Attributes:
        states: how whole states travel.
        up: how a client's changes travel.
        down: how the server's changes travel.
    """

    states: StateCodec
    up: ChangeForm
    down: ChangeForm
    name: str = "delta"
    changes: bool = True

    def wire_spec(self, shapes: Shapes, change: bool) -> Spec:
        """See :class:`fedstrata.wire.codec.Codec`; a change is a client's."""
        return change_spec(shapes, self.up) if change else self.states.wire_spec(shapes, False)

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        """See :class:`fedstrata.wire.codec.Codec`."""
        if reference is None:
            return self.states.encode(tensors, None, {})
        whole = {name: tensor.detach().cpu() - reference[name] for name, tensor in tensors.items()}
        for name in whole.keys() & residual.keys():
            whole[name] += residual[name]
        message = encode_change(whole, self.up)
        for name, sent in decode_change(message, shapes_of(whole), self.up).items():
            whole[name] -= sent
        return message, whole

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        """See :class:`fedstrata.wire.codec.Codec`."""
        if reference is None:
            return self.states.decode(message, None)
        return _added(reference, decode_change(message, shapes_of(reference), self.up))

    def check_change(self, message: Tensors, shapes: Shapes) -> None:
        """Check the content of a client's change.

        Raises:
            WireError: see :func:`fedstrata.wire.changes.check_change`.
        """
        check_change(message, shapes, self.up)

    def step(self, tensors: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
        """The change on the way down from ``held`` to ``tensors``, and what its receivers then hold."""
        message = encode_change({name: tensor - held[name] for name, tensor in tensors.items()}, self.down)
        return message, self.follow(message, held)

    def follow(self, message: Tensors, held: Tensors) -> Tensors:
        """What receivers of a change hold who held ``held``; as a whole part brings it, in the type of states."""
        new = _added(held, decode_change(message, shapes_of(held), self.down))
        return self.states.decode(self.states.encode(new, None, {})[0], None)

    def step_spec(self, shapes: Shapes) -> Spec:
        """What a change on the way down holds."""
        return change_spec(shapes, self.down)

    def check_step(self, message: Tensors, shapes: Shapes) -> None:
        """Check a change on the way down.

        Raises:
            WireError: it does not hold what it must.
        """
        check(message, self.step_spec(shapes))
        check_change(message, shapes, self.down)


def job_codec(dtype: str, forms: tuple[Form, Form] | None) -> Codec:
    """The codec of a job's ``[wire]``: of ``dtype``, or of changes in these forms, up and down.

    Raises:
        UserError: there is no such dtype.
    """
    states = make_codec(dtype)
    if forms is None:
        return states
    assert isinstance(states, StateCodec)
    up, down = (ChangeForm(*form) for form in forms)
    return DeltaCodec(states, up, down)


def shapes_of(tensors: Tensors) -> Shapes:
    """Tensor name -> shape."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _added(held: Tensors, change: Tensors) -> Tensors:
    return {name: tensor + change[name] for name, tensor in held.items()}
