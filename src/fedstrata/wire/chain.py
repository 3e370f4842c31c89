"""The way down of a codec of changes: what clients hold of each part, and the changes that led there.

A client that holds an older version of a part gets every change since then, or the whole part where that is not
longer. Which of them is decided by versions and shapes alone, so the same versions always mean the same message,
encoded once. A tensor of a change is named ``BEFORE-AFTER:NAME`` by the versions between which it leads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.wire.codec import Shapes, SizedTensors, Wire, WireError, payload_bytes
from fedstrata.wire.finite import not_finite

NAME = re.compile(r"([0-9]{1,9})-([0-9]{1,9}):(\w+)")


@dataclass(frozen=True)
class Step:
    """A change from one version of a part to a later one."""

    before: int
    after: int
    message: Tensors


@dataclass(frozen=True)
class Chain:
    """A part as up-to-date clients hold it.

    Attributes:
        version: of the server's weights that it was last led to.
        held: its tensors, fp32. They lag behind the server's by what the changes have left out.
        steps: the last changes, as many as together are not longer than the whole part.
    """

    version: int
    held: Tensors
    steps: tuple[Step, ...] = ()

    def flat(self) -> Tensors:
        """The steps as they are saved."""
        return {key: t for step in self.steps for key, t in named(step).items()}


class Chains:
    """The chains of all parts.

    Attributes:
        wire: whose codec is one of changes.
        each: part -> its chain.

    Args:
        wire: see above.
        start: the start model.
    """

    def __init__(self, wire: Wire, start: Mapping[str, Tensors]) -> None:
        self.wire = wire
        self.each = {part: Chain(0, tensors) for part, tensors in start.items()}
        self._messages: dict[str, dict[int, Tensors]] = {}

    def restore(self, part: str, version: int, held: Tensors, steps: Tensors) -> None:
        """Take over a chain that was saved."""
        self.each[part] = Chain(version, held, tuple(steps_of(steps)))

    def advance(self, part: str, version: int, weights: Tensors) -> Tensors:
        """The part as clients hold it from now on, once they are sent ``version``."""
        chain = self.each[part]
        if chain.version != version:
            self.each[part] = self._next(chain, version, weights)
            self._messages.pop(part, None)
        return self.each[part].held

    def message(self, part: str, before: int) -> Tensors:
        """What leads a client that holds version ``before`` to the newest version sent."""
        known = self._messages.setdefault(part, {})
        if before not in known:
            known[before] = self._message(self.each[part], before)
        return known[before]

    def _next(self, chain: Chain, version: int, weights: Tensors) -> Chain:
        whole = self._whole(weights)
        message, held = self.wire.step(weights, chain.held)
        if payload_bytes(message) >= whole:  # then the part itself is sent
            return Chain(version, self.wire.decode(self.wire.encode(weights)[0], held=weights))
        steps = [*chain.steps, Step(chain.version, version, message)]
        while sum(payload_bytes(step.message) for step in steps) > whole:
            steps.pop(0)
        return Chain(version, held, tuple(steps))

    def _message(self, chain: Chain, before: int) -> Tensors:
        later = [step for step in chain.steps if step.before >= before]
        if not later or later[0].before != before:
            return self.wire.encode(chain.held)[0]
        size = sum(payload_bytes(step.message) for step in later)
        return SizedTensors({key: t for step in later for key, t in named(step).items()}, size)

    def _whole(self, weights: Tensors) -> int:
        """Bytes of a whole part."""
        return self.wire.size({name: tuple(tensor.shape) for name, tensor in weights.items()})


def named(step: Step) -> Tensors:
    """A change under the names that it has in a chain."""
    return {f"{step.before}-{step.after}:{name}": tensor for name, tensor in step.message.items()}


def steps_of(message: Tensors) -> list[Step]:
    """The changes that a message is a chain of, in order; none where it is a whole part."""
    found: dict[tuple[int, int], Tensors] = {}
    for key, tensor in message.items():
        if (parsed := NAME.fullmatch(key)) is None:
            return []
        found.setdefault((int(parsed[1]), int(parsed[2])), {})[parsed[3]] = tensor
    return [Step(before, after, found[before, after]) for before, after in sorted(found)]


def receive(wire: Wire, message: Tensors, held: tuple[int, Tensors]) -> Tensors:
    """The part that a message leads to.

    Args:
        wire: how parts travel.
        message: a whole part or a chain, checked.
        held: version and tensors that are here: of a chain those before one of its changes, or the last ones.

    Raises:
        WireError: its numbers outgrow fp32 with their scales.
    """
    version, tensors = held
    steps = steps_of(message)
    if not steps:
        tensors = wire.decode(message, held=tensors)
    for step in steps:
        if step.before >= version:
            tensors = wire.follow(step.message, tensors)
    if name := not_finite(tensors):
        raise WireError(f"{name}: is not finite once multiplied by its scale")
    return tensors


def check_received(wire: Wire, message: Tensors, shapes: Shapes, version: int) -> int | None:
    """Check a message that is to lead to a version of a part.

    Returns:
        The version that it starts from; None where it is a whole part.

    Raises:
        WireError: it is neither a whole part nor a chain of changes to this version.
    """
    steps = steps_of(message) if wire.chained else []
    if not steps:
        wire.check(message, shapes)
        return None
    ends = [steps[0].before, *(step.after for step in steps)]
    if [step.before for step in steps] != ends[:-1] or ends != sorted(set(ends)) or ends[-1] != version:
        raise WireError(f"its changes do not lead to version {version}")
    for step in steps:
        wire.check_step(step.message, shapes)
    return ends[0]


def saved(chain: Chain) -> Weights:
    """A chain as files: kind -> tensors."""
    return {"held-": chain.held, "changes-": chain.flat()}
