"""What one client does in one round, as data; and the form of a method.

A method opens its paper to the engine through one function, ``plan``; the engine does the rest and never asks
which method it runs. To add a method: one file that subclasses :class:`Method`, one line in
``fedstrata.methods.METHODS``, one test, one config.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams

Payload = Literal["weights", "hidden_states", "activations"]
"""What the clients send: parts of the model; what its still encoder makes of their texts, with the labels; or the
hidden states of every batch, and their gradients, to layers that the server holds."""
ClientSchedule = Literal["apart", "in turn", "by batch"]
"""How the clients of a round stand to each other: each starts from the round's model, with its own copy of the
server's layers; each starts from where the one before has come to; or all train at once on one set of the server's
layers, which they visit batch by batch."""
Population = Literal["each", "pooled", "one"]
"""Whom a method asks: every client, one that holds all the data, or the first alone."""


@dataclass(frozen=True)
class Plan:
    """What one client does in one round.

    Parts are named as in the *global* model. ``layers[j]`` is the global layer that stands at position ``j`` of
    the client's local model: ``(0, 1, 2)`` is the three lowest; ``(0, 5, 5)`` has layer 5 twice. A trained layer
    stands in it exactly once.

    Attributes:
        layers: global layer index of every local layer, from the embeddings up.
        train: parts whose tensors get gradients; everything else is frozen.
        send: parts that cross the wire: up after training, and down, merged, whenever they have changed.
        keep: parts that stay in the client's own store from round to round and never cross the wire.
        features: the encoder stays as it is in every round and runs without dropout, so that what the head takes
            of it is computed once.
        server: layers that the server holds and trains: parts that stand next to each other. The client's batches
            pass through them and they are never sent.
    """

    layers: tuple[int, ...]
    train: tuple[str, ...]
    send: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    features: bool = False
    server: tuple[str, ...] = ()

    @property
    def local(self) -> tuple[int, ...]:
        """The layers that the client itself computes with."""
        return tuple(i for i in self.layers if f"layer.{i}" not in self.server)

    def builds(self, parts: Parts) -> tuple[str, ...]:
        """The parts the local model consists of, in the model's order."""
        layers = {f"layer.{i}" for i in self.local}
        return tuple(name for name in parts.names if not name.startswith("layer.") or name in layers)

    def check(self, parts: Parts) -> None:
        """Refuse a plan that the model cannot carry out.

        Raises:
            ValueError: an unknown part or layer, a trained layer that is not built exactly once, a part both
                sent and kept, a sent or kept part that is not built, a part of the encoder trained that is to
                stay as it is, or layers of the server that do not stand next to each other.
        """
        if strange := [i for i in self.layers if not 0 <= i < parts.depth]:
            raise ValueError(f"plan.layers: {strange} of a model with {parts.depth} layers")
        built = self.builds(parts)
        for field in ("train", "send", "keep"):
            for name in getattr(self, field):
                if name not in built:
                    raise ValueError(f"plan.{field}: {name!r} is not built by layers {self.layers}")
        if twice := {i for i in self.layers if self.layers.count(i) > 1 and f"layer.{i}" in self.train}:
            raise ValueError(f"plan.train: layers {sorted(twice)} stand in the local model more than once")
        places = [j for j, i in enumerate(self.layers) if f"layer.{i}" in self.server]
        if len(places) != len(self.server) or places != list(range(places[0], places[-1] + 1) if places else []):
            raise ValueError(f"plan.server: {self.server} do not stand next to each other in layers {self.layers}")
        if self.features and (learning := set(self.train) - {"pooler", "head"}):
            raise ValueError(f"plan.features: {sorted(learning)} of the encoder are trained")
        if both := set(self.send) & set(self.keep):
            raise ValueError(f"plan: {sorted(both)} both sent and kept")


class Method(BaseModel, ABC):
    """A method: its options as fields, and the plan it makes of them.

    Attributes:
        rounds: number of rounds.
        population: whom the engine asks.
        preset: settings of other tables of the job that this method's name stands for, under the user's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    population: ClassVar[Population] = "each"
    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    rounds: PositiveInt = 5

    @property
    def exchange(self) -> Payload:
        """What leaves the clients. With ``features`` they send them once and the server trains."""
        return "weights"

    @property
    def turns(self) -> ClientSchedule:
        """How the clients of a round stand to each other."""
        return "apart"

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of other tables that the method with these options stands for, under the user's own."""
        return self.preset

    @abstractmethod
    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The plan of ``client`` for ``round`` (0-based).

        Args:
            parts: the model's parts.
            task: the task's kind, such as ``mlm`` or ``classify``.
            round: 0-based round.
            client: the client's name.
            streams: random streams; draw only from ``streams.numpy(round, client, use)``.
        """
